"""What the terminal shows while Ray's workers train: a bar, and a line for each evaluation.

The workers' own output is long and interleaved, so it goes to files (``logs/`` in the run
directory) unless ``sg.verbose=true``. A thread of the driver reads the run directory, which works
wherever the trainer runs as long as the directory is shared.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from sg_rlhf.common import run_log

PLAN = "plan.json"
LOGS = "logs"
POLL_SECONDS = 0.5


class Progress:
    """Follows a run directory until closed; use as a context manager.

    Args:
        run_dir: the run directory.
        terminal: where the lines and the bar go.
    """

    def __init__(self, run_dir: Path, terminal: TextIO) -> None:
        self._run_dir = run_dir
        self._terminal = terminal
        self._started = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._bar: tqdm[Any] | None = None
        self._rollouts = run_log.Tail(run_dir / run_log.METRICS)
        self._evaluations = run_log.Tail(run_dir / run_log.EVALUATIONS)
        (run_dir / PLAN).unlink(missing_ok=True)

    def __enter__(self) -> Progress:
        self.say("starting Ray, the rollout engine and the trainer (about a minute) ...")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """One line above the bar."""
        tqdm.write(f"[{time.time() - self._started:5.0f}s] {text}", file=self._terminal)
        self._terminal.flush()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._read()

    def _read(self) -> None:
        if self._bar is None:
            path = self._run_dir / PLAN
            if not path.exists():
                return
            plan = json.loads(path.read_text())
            # A resumed run has rewritten its earlier rows before it writes the plan.
            if plan.get("remark"):
                self.say(plan["remark"])
            self._bar = tqdm(total=plan["rollouts"], desc="rollouts", file=self._terminal)
        for row in self._evaluations.new_rows():
            self.say(evaluation_line(row))
        for row in self._rollouts.new_rows():
            self._bar.set_postfix_str(rollout_line(row), refresh=False)
            self._bar.update(row["global_step"] - self._bar.n)


def rollout_line(row: dict[str, Any]) -> str:
    """The figures of one rollout, short."""
    parts = [f"reward {row['rollout/reward_mean']:+.2f}"]
    if "rollout/accuracy" in row:
        parts.append(f"accuracy {row['rollout/accuracy']:.2f}")
    for key, name in (("grad_norm_max", "grad"), ("kl", "kl")):
        if row.get(key) is not None:
            parts.append(f"{name} {row[key]:.3f}")
    parts.append(f"tokens {row['rollout/response_length_mean']:.0f}")
    return " ".join(parts)


def evaluation_line(row: dict[str, Any]) -> str:
    """The figures of one evaluation, short."""
    text = f"held-out after rollout {row['global_step']}: "
    if "eval_accuracy" in row:
        text += f"accuracy {row['eval_accuracy']:.3f} +- {row['eval_accuracy_ci95']:.3f}, "
    return (
        text
        + f"mean reward {row['eval_reward_mean']:+.2f} on {row['eval_num_prompts']:.0f} prompts"
    )


def keep_worker_logs(session_dir: Path, run_dir: Path) -> None:
    """Copy the workers' output of a local Ray session into ``logs/`` of the run directory."""
    target = run_dir / LOGS
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted((session_dir / "logs").glob("worker-*")):
        if path.stat().st_size:
            shutil.copyfile(path, target / path.name)
