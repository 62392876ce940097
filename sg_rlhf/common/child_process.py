"""The end of a process that this one started."""

from __future__ import annotations

import subprocess


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate a process and wait for it; kill it if it has not ended by then.

    Args:
        process: the child; it may have ended already.
        seconds: how long it may take.
    """
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
