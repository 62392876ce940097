"""Ends a run on SIGTERM, which schedulers send before they take a machine away.

The controller may run on another node, and it saves only between two rollouts. So the driver
creates a file in the run directory and waits. The controller looks for the file after every
rollout, saves a checkpoint and ends. If that takes longer than the grace time, or with a second
SIGTERM, the run ends without a checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.reporting import activity

STOP_FILE = ".end_asked_for"


class TerminatedNow(KeyboardInterrupt):
    """SIGTERM ends this process at once, as Ctrl-C does."""


def stop_requested(run_dir: Path | None) -> bool:
    """Whether the driver of the run got a SIGTERM."""
    return run_dir is not None and (run_dir / STOP_FILE).exists()


def interrupt(_signum: int, _frame: Any) -> None:
    """Handle SIGTERM before there is anything to save."""
    raise TerminatedNow("before the first rollout")


class GracefulStop:
    """Inside this context, the first SIGTERM asks the controller to save and end.

    Args:
        run_dir: the run directory; without one SIGTERM ends the run at once.
        seconds: how long the driver waits for the controller (``sg.grace_seconds``).
    """

    def __init__(self, run_dir: str | None, seconds: float) -> None:
        self._stop_file = Path(run_dir) / STOP_FILE if run_dir else None
        self._seconds = seconds
        self._requested = False
        self._shown_phase = contextlib.ExitStack()

    def __enter__(self) -> GracefulStop:
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)  # left by a run that was killed
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, interrupt)
        self._shown_phase.close()
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def _request_stop(self, _signum: int, _frame: Any) -> None:
        if self._requested or self._stop_file is None:
            raise TerminatedNow("at once")
        self._requested = True
        self._stop_file.touch()
        self._shown_phase.enter_context(
            activity.phase(
                activity.DRIVER,
                f"SIGTERM: a checkpoint is saved after this rollout, then the run ends; within "
                f"{self._seconds:g} s, or at once after another SIGTERM",
            )
        )
        signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-3))

    def _end(self, _signum: int, _frame: Any) -> None:
        raise TerminatedNow(f"no rollout ended within {self._seconds:g} s (sg.grace_seconds)")
