"""The environment of the software GPU: the packages of cuda.lock, NVIDIA's libraries replaced."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.software_gpu.cases import Case

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".cache" / "software_gpu"
PYTHON = VENV / "bin" / "python"
#: libcuda, libnvidia-ml and libcudart of the device, which no package has.
LIBRARIES = VENV / "software_gpu"
#: Ray and vLLM open several files for each process that they start.
OPEN_FILES = 65536
#: A micro-batch's token ids are fewer, its hidden states more.
LARGE_ELEMENTS = 100_000


def make() -> None:
    """Install what is missing, and build the device. A second call takes seconds.

    Raises:
        subprocess.CalledProcessError: one of the two failed, and has said why.
    """
    variables = {"SG_HARDWARE": "cuda", "SG_VENV": str(VENV.relative_to(ROOT))}
    subprocess.run(
        ["bash", "scripts/bootstrap.sh"], cwd=ROOT, env={**os.environ, **variables}, check=True
    )
    build = HERE / "device" / "build.py"
    command = [sys.executable, str(build), str(VENV), "--mark", "--out", str(LIBRARIES)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def library_variables(libraries: Path) -> dict[str, str]:
    """Of a process that uses the device, whose libraries are in that folder."""
    return {
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        # Else vLLM takes the first library with such a name that the process has loaded.
        "VLLM_CUDART_SO_PATH": str(libraries / "libcudart.so.13"),
    }


def remove_table(table: Path) -> None:
    """Delete a table, and what communicators and tests have left beside it."""
    for file in table.parent.glob(f"{table.name}*"):
        file.unlink(missing_ok=True)


def variables(case: Case, folder: Path) -> dict[str, str]:
    """What the processes of a case see of the device; ``folder`` is for what Triton compiles."""
    found = {
        **os.environ,
        "SOFTWARE_GPU_COUNT": str(case.devices),
        "SOFTWARE_GPU_GIB": str(case.gib),
        "SOFTWARE_GPU_TABLE": f"/dev/shm/software_gpu_{os.getpid()}",
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(ROOT)]),
        **library_variables(LIBRARIES),
        "PATH": os.pathsep.join([str(HERE / "bin"), os.environ.get("PATH", "")]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # It would look for a real driver.
        "SG_SKIP_DOCTOR": "1",
    }
    if case.values:
        found["SOFTWARE_GPU_VALUES"] = "1"
    if case.large:
        found |= {
            "SOFTWARE_GPU_VALUES_LIMIT": str(LARGE_ELEMENTS),
            "SOFTWARE_GPU_COPY_LIMIT_MIB": "1",
        }
    elif case.values:
        found["SOFTWARE_GPU_SMALL_ENGINE"] = "256"
    return found


def raise_open_files() -> None:
    """For this process and what it starts, as far as the machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
