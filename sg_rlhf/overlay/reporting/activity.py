"""Current activity of a run's processes, as rows of one file: ``logs/phases.jsonl``.

Each process appends its own rows, on every node: phases with their progress, messages, and the
section of the rollout step that the controller is in. :mod:`.terminal` shows them. A process writes
nothing until :func:`write_to` has named the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sg_rlhf.run_dir import jsonl_log, timing_keys

#: In the ``logs`` folder of the run directory.
FILE = "phases.jsonl"

#: Processes, as the terminal names them.
DRIVER = "driver"
ENGINE = "rollout engine"
TRAINER = "trainer"
CONTROLLER = "controller"

#: The driver's last phase. The phases of the workers say more.
STARTING_WORKERS = "starting the workers"

#: How the name of this phase begins, which the terminal does not repeat: it prints its progress.
RESERVING = "reserving"

#: Minimal seconds between two rows of :func:`show_progress`.
PROGRESS_SECONDS = 0.5

#: Section of a rollout step (:mod:`sg_rlhf.run_dir.timing_keys`) -> its name for the user.
LABELS = {
    "generation": "sampling",
    "engines_wake": "waking the engines",
    "make_experience": "making the experience",
    "old_log_probs": "scoring by the policy",
    "reference_log_probs": "scoring by the reference",
    "reward_model": "scoring by the reward model",
    "hand_over": "sending the samples to the ranks",
    "ppo_train": "updating",
    "broadcast": "syncing weights",
    "sync_check": "checking the sync",
    "checkpoint": "saving a checkpoint",
    "evaluation": "evaluating",
    "logging": "writing logs",
    timing_keys.OTHER: "between two parts",
}

#: The file of this process.
_log: Path | None = None
#: The phases that this process is in, the innermost last.
_phases: list[tuple[str, str]] = []
_last_progress = 0.0


def log_file(run_dir: Path) -> Path:
    """The activity log of a run directory."""
    return run_dir / "logs" / FILE


def write_to(file: Path | None) -> None:
    """Write this process's rows to ``file`` from now on; None writes nothing."""
    global _log
    _log = file


def clear(run_dir: Path) -> None:
    """Remove the log of an earlier start of the run."""
    with contextlib.suppress(OSError):
        log_file(run_dir).unlink(missing_ok=True)


@contextlib.contextmanager
def phase(who: str, what: str) -> Iterator[None]:
    """A part of this process's work that takes time. It hides the phase around it."""
    _phases.append((who, what))
    _append({"who": who, "what": what})
    try:
        yield
    finally:
        _phases.pop()
        outer = _phases[-1] if _phases else (who, None)
        _append({"who": outer[0], "what": outer[1]})


def show_progress(done: int, total: int) -> None:
    """Log how far the current phase is, at most every ``PROGRESS_SECONDS``."""
    global _last_progress
    if _phases and (done == total or time.monotonic() - _last_progress >= PROGRESS_SECONDS):
        _last_progress = time.monotonic()
        who, what = _phases[-1]
        _append({"who": who, "what": what, "done": done, "of": total})


def show_message(who: str, text: str) -> None:
    """Print a line in the output of this process and on the terminal."""
    print(text, flush=True)
    _append({"who": who, "said": text})


def set_status(rollout: int, part: str) -> None:
    """Log the part of a rollout, counted from 1, that the controller begins."""
    _append({"who": CONTROLLER, "rollout": rollout, "doing": LABELS.get(part, part)})


def last_status(run_dir: Path) -> str:
    """The last row of :func:`set_status`, as the end of a sentence; "" if there is none."""
    try:
        rows = jsonl_log.read(log_file(run_dir))
    except OSError:
        return ""
    for row in reversed(rows):
        if "rollout" in row:
            return f" while {row['doing']} (rollout {row['rollout']})"
    return ""


def _append(entry: dict[str, str | int | None]) -> None:
    if _log is None:
        return
    row = {"time": time.time(), "pid": os.getpid(), **entry}
    # If the disk is full, a row is missing. The run does not end for that.
    with contextlib.suppress(OSError):
        _log.parent.mkdir(parents=True, exist_ok=True)
        with _log.open("a") as file:  # appended lines of this length are not interleaved
            file.write(json.dumps(row) + "\n")
