"""A cluster that is not there is one line, at once."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from sg_rlhf.ray_session import cluster


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens(scheme: str, closed_port: int) -> None:
    address = f"{scheme}127.0.0.1:{closed_port}"
    with pytest.raises(cluster.ClusterError) as refusal:
        cluster.join(address)
    message = str(refusal.value)
    assert address in message and "refused" in message and "\n" not in message


def test_an_address_that_is_none() -> None:
    with pytest.raises(cluster.ClusterError, match="Ray at nonsense: cannot join"):
        cluster.join("nonsense")


def test_a_process_that_does_not_end_is_killed() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal, time\n"
         "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    cluster.kill_all([psutil.Process(child.pid)], grace_seconds=0.2)
    assert child.wait(300) == -9


def test_an_alarm_that_comes_as_the_call_ends_raises_nothing() -> None:
    program = """
import signal
from sg_rlhf.ray_session import cluster
arm = signal.setitimer
def alarm_before_it_is_off(timer, seconds, interval=0.0):
    if not seconds:
        signal.raise_signal(signal.SIGALRM)
    arm(timer, seconds, interval)
signal.setitimer = alarm_before_it_is_off
before = signal.getsignal(signal.SIGALRM)
cluster._call_within(600.0, lambda: None)
assert signal.getsignal(signal.SIGALRM) is before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_start_that_takes_too_long_is_made_again_and_given_up() -> None:
    """In a process of its own: the signal is the one by which pytest ends a test.

    Ray waits before it starts its worker: it starts its C++ log there, and a second start of the
    log ends the process.
    """
    program = """
import time
import psutil
from ray._private.node import Node
from sg_rlhf.ray_session import cluster as ray_cluster
Node.start_ray_processes = lambda self: time.sleep(600)
try:
    ray_cluster.start(attempts=2, seconds=1, num_cpus=1)
except ray_cluster.ClusterError as error:
    print(error)
_, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=300)
print([process.cmdline() for process in left])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refusal, left = done.stdout.splitlines()
    assert refusal.startswith("Ray did not start (attempt 2): it was not there after 1 s")
    assert left == "[]"


def test_a_machine_without_ipv4_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_options: object) -> None:
        raise RuntimeError("gcs_server_port")

    monkeypatch.setattr(cluster.ray, "init", fails)
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: "fd00::5")
    with pytest.raises(cluster.ClusterError, match="on fd00::5: give this machine an IPv4 address"):
        cluster.start()
