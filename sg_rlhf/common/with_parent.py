"""Run a module in a process that ends when its parent ends.

    python -m sg_rlhf.common.with_parent PARENT_PID MODULE ARGUMENTS...

For servers that a command starts: a command that gets SIGKILL cannot stop them. Linux can send a
signal when the parent ends. The new process requests it here, because `preexec_fn` of `subprocess`
may deadlock in a parent with threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request the signal, then run the module."""
    parent, *sys.argv = sys.argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(f"{sys.argv[0]}: process {parent}, which started this one, has ended")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
