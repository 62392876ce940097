"""A server that is started with its parent ends with it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "sg_rlhf.common.with_parent"]
#: Starts the module of the argument and waits for it.
PARENT = """
import os, subprocess, sys
subprocess.run([*sys.argv[1:4], str(os.getpid()), *sys.argv[4:]])
"""


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "server_of_mine.py").write_text(
        "import os, sys, time\nprint(os.getpid(), *sys.argv[1:], flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *COMMAND, "server_of_mine", "--port", "0"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        try:
            number, *arguments = parent.stdout.readline().split()
            assert arguments == ["--port", "0"]
            child = psutil.Process(int(number))
        finally:
            parent.kill()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_does_not_begin_where_the_parent_has_gone() -> None:
    done = subprocess.run([*COMMAND, "1", "this"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "this: process 1, which started this one, has ended" in done.stderr
