"""The end of a process that this one started."""

from __future__ import annotations

import subprocess


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate a process; kill it if it has not ended after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
