"""Run a module in a process that ends with its parent.

    python -m sg_rlhf.common.with_parent PARENT_PID MODULE ARGUMENTS...

For servers that a command starts: SIGKILL leaves the command no time to stop them. Linux has a
signal for that. It is asked for here, in the new process, as `preexec_fn` of `subprocess` may
deadlock in a parent that has threads.
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
    """Ask for the signal, then be the module."""
    parent, *sys.argv = sys.argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(f"{sys.argv[0]}: process {parent}, which started this one, has ended")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
