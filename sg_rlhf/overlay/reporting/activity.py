"""What the driver and the workers of a run are busy with, as lines of one file.

Between the command and the first rollout several processes start at once, on other nodes too. Each
says here what it is doing, and :mod:`sg_rlhf.overlay.reporting.terminal` shows it on the terminal.
Only a
process that finds the file's name in its environment writes, so that everything below may be used
without a run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

#: Names the file, in the driver's and every worker's environment.
VARIABLE = "SG_PHASES"
FILE = "phases.jsonl"

#: Who can be busy; each name is what the terminal shows.
DRIVER = "driver"
ENGINE = "rollout engine"
TRAINER = "trainer"
CONTROLLER = "controller"

#: The driver's last phase, of which a worker's own phases say more as soon as there are any.
WORKERS = "starting the workers"

#: Of which there are lines of its own, and none that it goes on.
PLACES = "asking the cluster for places"

#: Seconds between two lines of :func:`count`.
COUNT_EVERY = 0.5

_open: list[tuple[str, str]] = []
_counted = 0.0


@contextlib.contextmanager
def phase(who: str, what: str) -> Iterator[None]:
    """A part of the work of this process that somebody may have to wait for.

    One inside another hides it until it ends.
    """
    _open.append((who, what))
    _write(who, what)
    try:
        yield
    finally:
        _open.pop()
        outer = _open[-1] if _open else (who, None)
        _write(*outer)


def nested(what: str) -> contextlib.AbstractContextManager[None]:
    """A phase of whoever is busy in this process; nothing if nobody is."""
    return phase(_open[-1][0], what) if _open else contextlib.nullcontext()


def show_progress(done: int, total: int) -> None:
    """How far the current phase is."""
    global _counted
    if _open and (done == total or time.monotonic() - _counted >= COUNT_EVERY):
        _counted = time.monotonic()
        _write(*_open[-1], done=done, of=total)


def show_message(who: str, text: str) -> None:
    """One line for the terminal, and for the log of this process."""
    print(text, flush=True)
    _append({"who": who, "said": text})


def _write(who: str, what: str | None, **more: int) -> None:
    _append({"who": who, "what": what, **more})


def _append(entry: dict[str, str | int | None]) -> None:
    name = os.environ.get(VARIABLE)
    if not name:
        return
    row = {"time": time.time(), "pid": os.getpid(), **entry}
    path = Path(name)
    # Where the disk is full a line is missing on the terminal, and no run ends for that.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:  # short lines in append mode are not mixed
            file.write(json.dumps(row) + "\n")
