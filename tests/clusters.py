"""Ray clusters of several machines on this one: for each a raylet with an address of its own.

Every machine has a loopback address (127.0.0.N), a disk, ports and logical GPUs of its own, and a
Python that has the locked packages and nothing of this project, as a machine does that a job is
submitted to. Its disk is a folder that every machine sees at the same path, each its own, by a
mount that nobody else sees; whatever else is on this machine, all of them share.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
#: This environment's command.
RAY = str(Path(sys.executable).parent / "ray")
#: A machine that does not answer within this is not there.
START_SECONDS = 1200.0
OBJECT_STORE = 100 * 2**20


def bare_python(folder: Path) -> Path:
    """A Python with this environment's packages, but without this project, in a new folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path that another `.pth` names is not searched for `.pth` files, where an editable install
    # of the project is named.
    (site / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import ray, sg_rlhf"], cwd=folder, capture_output=True, text=True
    )
    assert "No module named 'sg_rlhf'" in found.stderr, found.stderr
    return python


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@functools.cache
def own_mounts() -> list[str]:
    """The command that starts another with mounts of its own; empty where that is not allowed."""
    for flags in (["--mount"], ["--map-root-user", "--mount"]):
        command = ["unshare", *flags, "--propagation", "private"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return []


@dataclass
class Machine:
    """One machine: the process of its ``ray start`` and what is under it."""

    address: str
    disk: Path
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """All of it that is alive."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Everything on it at once, as when its power fails."""
        found = self.processes()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=300)
        self.process.wait(300)


class Cluster:
    """Machines that are one cluster; a context manager that leaves none of them behind.

    Args:
        folder: for the machines' logs and the Python; what Ray keeps is elsewhere, as the names of
            its sockets must be short.
        environment: of the machines.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.python = bare_python(folder / "python")
        self._temporary = Path(tempfile.mkdtemp(prefix="sgc", dir="/tmp"))
        #: Where each machine sees its own disk.
        self.disk = self._temporary / "disk"
        self.disk.mkdir()
        path = f"{self.python.parent}{os.pathsep}{environment['PATH']}"
        # On a busy machine Ray's own 30 seconds are too few for the dashboard.
        slow = {"RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": f"{START_SECONDS:g}"}
        # Whatever token Ray left in the home of who runs the tests.
        self.environment = {**environment, **slow, "RAY_AUTH_MODE": "disabled", "PATH": path}
        self.machines: list[Machine] = []
        self.gcs = self.dashboard = ""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in reversed(self.machines):
            machine.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, gpus: int, cpus: int, **environment: str) -> Machine:
        """One more machine; the first is the head.

        Args:
            environment: beside the cluster's.
        """
        while True:
            machine = self._start(gpus, cpus, environment)
            self.machines.append(machine)
            if self._is_there(machine):
                return machine
            # On a busy machine Ray's 30 seconds for a raylet are too few.
            assert "timed out during startup" in self.log(machine), self.log(machine)
            machine.kill()
            self.machines.remove(machine)
            shutil.rmtree(machine.disk)

    def _start(self, gpus: int, cpus: int, environment: Mapping[str, str]) -> Machine:
        number = len(self.machines) + 1
        # Ray takes 127.0.0.1 for the outer address of the machine.
        address = f"127.0.0.{number + 1}"
        disk = self._temporary / str(number)
        disk.mkdir()
        mounts, seen = own_mounts(), disk
        if mounts:
            seen = self.disk
            mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
            mounts = [*mounts, "sh", "-c", mount, "sh", str(disk), str(seen)]
        ports = free_ports(8)
        words = [
            f"--node-ip-address={address}", f"--num-gpus={gpus}", f"--num-cpus={cpus}",
            f"--temp-dir={seen}", f"--object-store-memory={OBJECT_STORE}",
            "--min-worker-port=0", "--max-worker-port=0",
            f"--node-manager-port={ports[0]}", f"--object-manager-port={ports[1]}",
            f"--dashboard-agent-listen-port={ports[2]}", f"--dashboard-agent-grpc-port={ports[3]}",
            f"--runtime-env-agent-port={ports[4]}", f"--metrics-export-port={ports[5]}",
            "--disable-usage-stats", "--block",
        ]  # fmt: skip
        if not self.machines:
            self.gcs, self.dashboard = f"{address}:{ports[6]}", f"http://{address}:{ports[7]}"
            words += [
                "--head", f"--port={ports[6]}", f"--dashboard-host={address}",
                f"--dashboard-port={ports[7]}",
                f"--ray-client-server-port={free_ports(1)[0]}",
            ]  # fmt: skip
        else:
            words.append(f"--address={self.gcs}")
        with (self._folder / f"machine{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*mounts, self.python, "-m", "ray.scripts.scripts", "start", *words],
                cwd=self._folder, env={**self.environment, **environment},
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Machine(address, disk, process)

    def _is_there(self, machine: Machine) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if machine.process.poll() is not None:
                return False
            if machine.address in self.alive():
                return True
            time.sleep(0.3)
        raise TimeoutError(f"{machine.address} is not there: {self.log(machine)}")

    def log(self, machine: Machine) -> str:
        """What a machine's ``ray start`` printed."""
        number = self.machines.index(machine) + 1
        return (self._folder / f"machine{number}.log").read_text(errors="replace")

    def alive(self) -> list[str]:
        """Addresses of the machines that the head takes for alive."""
        try:
            with urllib.request.urlopen(f"{self.dashboard}/nodes?view=summary", timeout=5) as said:
                nodes: list[dict[str, Any]] = json.load(said)["data"]["summary"]
        except (OSError, KeyError):
            return []
        return [n.get("ip", "") for n in nodes if n.get("raylet", {}).get("state") == "ALIVE"]


class Submitted:
    """A run as a job of a cluster, submitted from the repository.

    Args:
        to: the cluster.
        train: of ``sg-rlhf train``, without its name.
    """

    def __init__(self, to: Cluster, train: Sequence[str]) -> None:
        self._cluster = to
        self._lines: list[str] = []
        variables = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}})
        command = [
            RAY, "job", "submit", "--address", to.dashboard, "--working-dir", str(ROOT),
            "--runtime-env-json", variables, "--", "python", "-m", "sg_rlhf", "train",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [*command, *train], cwd=ROOT, env=to.environment | {"PYTHONUNBUFFERED": "1"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    @property
    def output(self) -> str:
        """What it printed so far."""
        return "".join(self._lines)

    def await_file(self, file: Path, lines: int, seconds: float = 1800.0) -> None:
        """Wait until a file has so many lines."""
        deadline = time.monotonic() + seconds
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def stop(self) -> None:
        """``ray job stop``."""
        (job,) = set(re.findall(r"raysubmit_\w+", self.output))
        subprocess.run(
            [RAY, "job", "stop", "--no-wait", "--address",
             self._cluster.dashboard, job],
            env=self._cluster.environment, check=True, capture_output=True,
        )  # fmt: skip

    def finish(self, seconds: float = 1800.0) -> int:
        """Wait for its end; the exit status of ``ray job submit``: 0, or 1 for a failure."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(self.output) from None
        self._reader.join(10)
        return status


@contextlib.contextmanager
def cluster(folder: Path, environment: Mapping[str, str], *gpus: int) -> Iterator[Cluster]:
    """A cluster with a machine for each number of GPUs, and two CPUs beside them."""
    with Cluster(folder, environment) as made:
        for count in gpus:
            made.add(count, count + 2)
        yield made


def main() -> None:
    """Try it: machines with so many GPUs each, until Ctrl-C."""
    from tests.integration.conftest import environment

    folder = Path(sys.argv[1])
    with cluster(folder, environment(), *map(int, sys.argv[2:])) as made:
        print(made.gcs, made.dashboard, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(10**6)


if __name__ == "__main__":
    main()
