"""What a run is doing at this moment: a line of ``logs/now.json``, of the controller's making.

For whoever looks at a run that is silent, and for the line of one that ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.run_dir import timing_keys

FILE = Path("logs") / "now.json"
#: The parts of a rollout in words.
LABELS = {
    "generation": "sampling",
    "engines_wake": "waking the engines",
    "make_experience": "making the experience",
    "old_log_probs": "scoring by the policy",
    "reference_log_probs": "scoring by the reference",
    "reward_model": "scoring by the reward model",
    "values": "scoring by the critic",
    "hand_over": "handing the experience over",
    "ppo_train": "updating",
    "broadcast": "syncing weights",
    "sync_check": "checking the sync",
    "checkpoint": "saving a checkpoint",
    "evaluation": "evaluating",
    "logging": "writing logs",
    timing_keys.OTHER: "between two parts",
}


def set_status(run_dir: Path, rollout: int, part: str) -> None:
    """Write what is under way.

    Args:
        run_dir: the run's directory.
        rollout: counted from 1.
        part: a name of :mod:`sg_rlhf.run_dir.timing_keys`.
    """
    row = {"rollout": rollout, "doing": LABELS.get(part, part), "since": time.time()}
    with contextlib.suppress(OSError):  # a full disk is told by what needs it
        write_whole(run_dir / FILE, json.dumps(row) + "\n")


def last_status(run_dir: Path) -> str:
    """What was under way at last, for the end of a sentence; "" where nothing was told."""
    try:
        row = json.loads((run_dir / FILE).read_text())
        return f" while {row['doing']} (rollout {row['rollout']})"
    except (OSError, ValueError, KeyError):
        return ""


def clear_status(run_dir: Path) -> None:
    """What an earlier start of the run was doing is no longer so."""
    with contextlib.suppress(OSError):
        (run_dir / FILE).unlink(missing_ok=True)
