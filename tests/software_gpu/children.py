"""Child processes of the device's tests: each sees a machine with software GPUs of its own.

A test file is also the program of its children::

    machine.run(function, "argument")      # python test_file.py function argument

    if __name__ == "__main__":
        children.main(globals())
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.software_gpu import environment
from tests.software_gpu.environment import ROOT

DRIVER = Path(sys.prefix, "software_gpu")
SECONDS = 240
#: Variables of the caller that would change what a child sees.
CLEARED = ("SOFTWARE_GPU_", "CUDA_", "TRITON_", "PYTORCH_", "NCCL_")


def missing() -> str | None:
    """Why the tests cannot run here; None if they can."""
    if not (DRIVER / "libcuda.so.1").is_file():
        return f"no software GPU in {sys.prefix}: tests/software_gpu/device/build.py puts it there"
    import torch

    return None if torch.version.cuda else "PyTorch is built without CUDA"


class Machine:
    """Environment of the children: a table of their own and the settings of the software GPU."""

    def __init__(self, **variables: str) -> None:
        self.table = Path(f"/dev/shm/software_gpu_test_{uuid.uuid4().hex[:12]}")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(CLEARED)}
        self.variables = {
            **kept,
            "SOFTWARE_GPU_TABLE": str(self.table),
            **environment.library_variables(DRIVER),
            "PYTHONPATH": str(ROOT),
            **variables,
        }

    def close(self) -> None:
        """Remove the table and what communicators have left beside it."""
        environment.remove_table(self.table)

    def start(
        self, function: Callable[..., None], *arguments: object, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a child that calls a function of a test file."""
        file = function.__code__.co_filename
        command = [sys.executable, file, function.__name__, *map(str, arguments)]
        return subprocess.Popen(
            command, env={**self.variables, **variables}, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @contextmanager
    def started(
        self, function: Callable[..., None], *arguments: object, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A child that has printed "ready"; it is killed at the end."""
        child = self.start(function, *arguments, **variables)
        assert child.stdout
        try:
            seen = []
            for line in child.stdout:
                seen.append(line)
                if line == "ready\n":
                    break
            else:
                raise AssertionError("".join(seen))
            yield child
        finally:
            child.kill()
            child.communicate()

    def run(self, function: Callable[..., None], *arguments: object, **variables: str) -> str:
        """Run a child; returns its output. It must succeed."""
        child = self.start(function, *arguments, **variables)
        return finished(child)

    def ranks(self, function: Callable[..., None], size: int, *arguments: object) -> list[str]:
        """Run one child per rank, function(rank, size, rendezvous file, ...); their outputs."""
        meeting = f"{self.table}.store"
        children = [
            self.start(function, rank, size, meeting, *arguments, SOFTWARE_GPU_COUNT=str(size))
            for rank in range(size)
        ]
        try:
            return [finished(child) for child in children]
        finally:
            for child in children:
                child.kill()

    def nvidia_smi(self, *arguments: str) -> str:
        """What nvidia-smi prints."""
        program = ROOT / "tests/software_gpu/bin/nvidia-smi"
        done = subprocess.run(
            [sys.executable, program, *arguments], env=self.variables, check=True,
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        return done.stdout

    def used_mib(self) -> list[int]:
        """MiB that all processes have taken of each device."""
        text = self.nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits")
        return [int(line) for line in text.split()]


def finished(child: subprocess.Popen[str]) -> str:
    """Output of a child that must succeed."""
    try:
        output, _ = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        raise AssertionError(f"no end within {SECONDS} s:\n{output}") from None
    assert child.returncode == 0, output
    return output


def ready() -> None:
    """Tell the test that the child is where it wants it, and wait for it."""
    print("ready", flush=True)
    sys.stdin.readline()


def main(functions: dict[str, Any]) -> None:
    """Call the function of the command line."""
    functions[sys.argv[1]](*sys.argv[2:])
