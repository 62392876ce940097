"""SIGTERM: what schedulers send before they take a machine away. A last checkpoint, then the end.

The controller, which may run on another machine, saves between two rollouts alone. So the driver
leaves a request in the run directory and waits; the controller looks for it after every rollout.
What has not come to a checkpoint within the grace time ends without one, as does a second SIGTERM.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.reporting import activity

STOP_FILE = ".end_asked_for"


class TerminatedNow(KeyboardInterrupt):
    """SIGTERM ends this process as Ctrl-C does: before there is anything to save, or at last."""


def stop_requested(run_dir: Path | None) -> bool:
    """Whether the run's driver has been told to end it."""
    return run_dir is not None and (run_dir / STOP_FILE).exists()


def interrupt(_signum: int, _frame: Any) -> None:
    """SIGTERM where there is nothing to save."""
    raise TerminatedNow("before the first rollout")


class GracefulStop:
    """While it is entered, the first SIGTERM asks the controller to save and end.

    Args:
        run_dir: of the run; without one SIGTERM ends it at once.
        seconds: how long the driver waits for that.
    """

    def __init__(self, run_dir: str | None, seconds: float) -> None:
        self._request = Path(run_dir) / STOP_FILE if run_dir else None
        self._seconds = seconds
        self._asked = False
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> GracefulStop:
        if self._request is not None:
            self._request.unlink(missing_ok=True)  # of a run that was killed before it heeded it
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, interrupt)
        self._shown.close()
        if self._request is not None:
            self._request.unlink(missing_ok=True)

    def _ask(self, _signum: int, _frame: Any) -> None:
        if self._asked or self._request is None:
            raise TerminatedNow("at once")
        self._asked = True
        self._request.touch()
        self._shown.enter_context(
            activity.phase(
                activity.DRIVER,
                f"SIGTERM: a checkpoint after this rollout, then the end; at the latest in "
                f"{self._seconds:g} s, or at once with another SIGTERM",
            )
        )
        signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-3))

    def _end(self, _signum: int, _frame: Any) -> None:
        raise TerminatedNow(f"no rollout ended within {self._seconds:g} s (sg.grace_seconds)")
