"""A grading worker computes and answers, and can do nothing else: a line for each thing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from sg_rlhf.tasks.math.answers import worker
from sg_rlhf.tasks.math.grading import WorkerPool, grade

pytestmark = pytest.mark.skipif(
    not worker.is_supported(), reason="system calls are filtered on Linux x86-64 alone"
)

ATTEMPTS = {
    "a socket": "socket.socket()",
    "a local socket": "socket.socket(socket.AF_UNIX)",
    "another program": "subprocess.run(['/bin/true'])",
    "a shell": "assert os.system('true') == 0",
    "another process": "os.fork()",
    "a file": "open(path, 'w')",
    "more of a file": "open(path, 'a')",
    "a deletion": "os.unlink(path)",
    "a name": "os.rename(path, path + '2')",
    "a folder": "os.mkdir(path + '3')",
    "a link": "os.symlink(path, path + '4')",
    "a mode": "os.chmod(path, 0o777)",
    "a signal": "os.kill(os.getppid(), 0)",
    "limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "memory": "bytearray(3 * 2**30)",
    "a mode, by the newest call": "call(452, -100, path.encode(), 0o777, 0)",
    "an attribute": "call(188, path.encode(), b'user.x', b'1', 1, 0)",
    "a time": "call(280, -100, path.encode(), None, 0)",
    "shared memory": "call(29, 0, 4096, 0o600)",
    "semaphores": "call(64, 0, 1, 0o600)",
    "a message queue": "call(240, f'sg_{os.getpid()}'.encode(), 0o102, 0o600, None)",
    "a queue of messages": "call(68, 0, 0o600)",
    "a thread": "threading.Thread(target=print).start()",
    "a call of the other numbering": "call(0x40000000 + 39)",
    "a call of the future": "call(1000)",
}
ALLOWED = {
    "reading": "open(__import__('sys').executable, 'rb').read(4)",
    "arithmetic": "assert 2**1000 % 7 == 2",
    "a pipe that is open": "os.write(ends[1], b'x')",
}


def run(code: str, path: str) -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(f"""
        import ctypes, os, resource, socket, subprocess, threading
        from sg_rlhf.tasks.math.answers import worker
        path, ends = {path!r}, os.pipe()
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        def call(*words):
            if syscall(*words) < 0:
                raise OSError(ctypes.get_errno(), "refused")
        worker.enter_sandbox()
        assert "Seccomp:\\t2" in open("/proc/self/status").read()
        try:
            {code}
        except (OSError, MemoryError, ValueError, AssertionError, RuntimeError) as error:
            print("refused", error)
        else:
            print("done")
    """)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_worker_cannot(what: str, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "there")
    with open(path, "w") as file:
        file.write("as it was")
    found = run(ATTEMPTS[what], path)
    assert found.stdout.startswith("refused"), found.stdout + found.stderr
    assert os.listdir(tmp_path) == ["there"]
    with open(path) as file:
        assert file.read() == "as it was"


@pytest.mark.parametrize("what", ALLOWED)
def test_a_worker_can(what: str, tmp_path: os.PathLike[str]) -> None:
    found = run(ALLOWED[what], str(tmp_path))
    assert found.stdout.endswith("done\n"), found.stdout + found.stderr


def test_the_workers_of_the_pool_are_confined_and_still_grade() -> None:
    pool = WorkerPool(1)
    try:
        assert grade(r"\boxed{x^2+2x+1}", "(x+1)^2", pool).correct
        (started,) = pool._started
        with open(f"/proc/{started.process.pid}/status") as status:
            lines = status.read().splitlines()
        assert "Seccomp:\t2" in lines
        # It is ended by its timer in whatever it computes, and replaced.
        assert grade(r"\boxed{\frac{x^2-1}{x-1}}", "x+1", pool).correct
    finally:
        pool.close()
