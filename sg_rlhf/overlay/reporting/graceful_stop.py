"""Ends a run on SIGTERM or SIGHUP: a scheduler takes the machine away, or a terminal is closed.

The controller may run on another node, so the driver creates a file in the run directory. The
controller looks for it after every rollout, saves a checkpoint and ends. If that takes longer than
the grace time, or with a second signal, the run ends without a checkpoint. Signals within a second
are one: ``timeout`` signals its child and then the child's process group.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from types import FrameType

from sg_rlhf.overlay.reporting import activity

STOP_FILE = ".end_asked_for"
#: The same signal within this time is the same request.
REPEAT_SECONDS = 1.0


class TerminatedNow(KeyboardInterrupt):
    """SIGTERM or SIGHUP ends this process at once, as Ctrl-C does."""


class _Received:
    """The last signal that ended this process or is to end it; None before."""

    number: signal.Signals | None = None
    at = 0.0


def _is_new(signum: int) -> bool:
    now, before, at = time.monotonic(), _Received.number, _Received.at
    _Received.number, _Received.at = signal.Signals(signum), now
    return before != signum or now - at > REPEAT_SECONDS


def requested() -> bool:
    """Whether this process got a signal that ends it."""
    return _Received.number is not None


def signal_name() -> str:
    """The name of that signal, for a message."""
    return (_Received.number or signal.SIGTERM).name


def exit_status() -> int:
    """The exit status of a process that ends by it, as a shell counts it."""
    return 128 + (_Received.number or signal.SIGTERM)


def signals() -> list[signal.Signals]:
    """The signals that end a run, without a SIGHUP that ``nohup`` has turned off."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if kept else [signal.SIGTERM, signal.SIGHUP]


def stop_requested(run_dir: Path | None) -> bool:
    """Whether the driver of the run got such a signal."""
    return run_dir is not None and (run_dir / STOP_FILE).exists()


def interrupt(signum: int, _frame: FrameType | None) -> None:
    """Handle a signal before there is anything to save, and Ctrl-C at any time."""
    if not _is_new(signum):
        return
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise TerminatedNow("before the first rollout")


class GracefulStop:
    """Inside this context, the first SIGTERM or SIGHUP asks the controller to save and end."""

    def __init__(self, run_dir: str | None, seconds: float) -> None:
        self._stop_file = Path(run_dir) / STOP_FILE if run_dir else None
        self._seconds = seconds
        self._requested = False
        self._shown_phase = contextlib.ExitStack()

    def __enter__(self) -> GracefulStop:
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)  # left by a run that was killed
        for number in signals():
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in signals():
            signal.signal(number, interrupt)
        self._shown_phase.close()
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def _request_stop(self, signum: int, _frame: FrameType | None) -> None:
        if not _is_new(signum):
            return
        if self._requested or self._stop_file is None:
            raise TerminatedNow("at once")
        self._requested = True
        self._stop_file.touch()
        self._shown_phase.enter_context(
            activity.phase(
                activity.DRIVER,
                f"{signal_name()}: a checkpoint is saved after this rollout, then the run ends; "
                f"within {self._seconds:g} s, or at once after another {signal_name()}",
            )
        )
        signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-3))

    def _end(self, _signum: int, _frame: FrameType | None) -> None:
        raise TerminatedNow(f"no rollout ended within {self._seconds:g} s")
