"""Shows a run on the terminal: current phases, a progress bar, and one line per evaluation.

If standard error is a file, each rollout is a line and there is no bar. The output of the workers
goes to files (``logs/`` in the run directory) unless ``sg.verbose=true``. A thread of the driver
reads the run directory, which also works with workers on other nodes.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from sg_rlhf.common.redaction import redact_text
from sg_rlhf.common.text import listed
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.run_dir import jsonl_log

PLAN = "plan.json"
LOGS = "logs"
POLL_SECONDS = 0.5
#: Without a terminal, seconds after which a phase that still runs is shown again.
REPEAT_SECONDS = 15.0
#: Seconds within which the same message of another process is not shown again.
DUPLICATE_SECONDS = 30.0
#: Samples that a line names at most.
MAX_NAMED = 4


@dataclass
class Activity:
    """The current phase of a process."""

    who: str
    what: str
    since: float
    done: int | None = None
    of: int | None = None

    def text(self, now: float) -> str:
        counted = f" {self.done}/{self.of}" if self.of else ""
        return f"{self.label()}{counted} ({now - self.since:.0f} s)"

    def label(self) -> str:
        return with_label(self.who, self.what)


def with_label(who: str, text: str) -> str:
    """``text`` with the name of its process. The driver is the command itself and has no name."""
    return text if who == activity.DRIVER else f"{who}: {text}"


class Progress:
    """Follows a run directory until closed; use as a context manager."""

    def __init__(self, run_dir: Path, terminal: TextIO) -> None:
        self._run_dir = run_dir
        self._terminal = terminal
        self._live = terminal.isatty()
        self._started = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._bar: tqdm[Any] | None = None
        self._status: tqdm[Any] | None = None
        self._activities: dict[tuple[int, str], Activity] = {}
        self._shown_phases: set[str] = set()
        self._messages: dict[str, float] = {}
        self._last_line = self._started
        (run_dir / PLAN).unlink(missing_ok=True)
        self._phases = jsonl_log.Tail(activity.log_file(run_dir))
        self._rollouts = jsonl_log.Tail(run_dir / jsonl_log.METRICS)
        self._evaluations = jsonl_log.Tail(run_dir / jsonl_log.EVALUATIONS)
        self._nonfinite = jsonl_log.Tail(run_dir / jsonl_log.NONFINITE)

    def __enter__(self) -> Progress:
        # Not in the thread: both import modules. While the main thread starts Ray, which forks, an
        # importing thread once waited for Python's import lock forever.
        tqdm.get_lock()  # type: ignore[no-untyped-call]
        if self._live:
            self._status = tqdm(bar_format="{desc}", file=self._terminal, leave=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        for bar in (self._status, self._bar):
            if bar is not None:
                bar.close()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._last_line = time.time()
        tqdm.write(f"[{self._last_line - self._started:5.0f}s] {text}", file=self._terminal)
        self._terminal.flush()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._read()
            self._show()

    def _read(self) -> None:
        for row in self._phases.new_rows():
            self._handle_event(row)
        if self._bar is None and not self._open_bar():
            return
        assert self._bar is not None
        for row in self._evaluations.new_rows():
            self.say(evaluation_line(row))
        for row in self._nonfinite.new_rows():
            self.say(nonfinite_line(row))
        rows = self._rollouts.new_rows()
        for row in rows:
            self._bar.set_postfix_str(rollout_line(row), refresh=False)
            self._bar.update(row["global_step"] - self._bar.n)
        if rows and not self._live:
            # A resumed run starts with all earlier rows, so only the last one is printed.
            self.say(
                f"rollout {rows[-1]['global_step']} of {self._bar.total}: {rollout_line(rows[-1])}"
            )

    def _open_bar(self) -> bool:
        path = self._run_dir / PLAN
        if not path.exists():
            return False
        plan = json.loads(path.read_text())
        # The plan exists, so a resumed run has already dropped the rows after its checkpoint.
        for remark in plan["remarks"]:
            self.say(remark)
        if self._status is not None:
            self._status.close()
            self._status = None
        # In a file, a bar would be one long line with carriage returns.
        self._bar = tqdm(
            total=plan["rollouts"], desc="rollouts", file=self._terminal, disable=not self._live
        )
        return True

    def _handle_event(self, row: dict[str, Any]) -> None:
        if "said" in row:
            line = with_label(row["who"], row["said"])
            if row["time"] - self._messages.get(line, -math.inf) > DUPLICATE_SECONDS:
                self._messages[line] = row["time"]
                self.say(redact_text(line))
            return
        if "what" not in row:
            return  # the part of a rollout: the bar and the phases show enough
        key = (row["pid"], row["who"])
        before = self._activities.get(key)
        if row["what"] is None:
            if before is not None:
                del self._activities[key]
            return
        if before is None or before.what != row["what"]:
            before = self._activities[key] = Activity(row["who"], row["what"], row["time"])
            # Once per phase: all ranks do the same, and each evaluation prints its result.
            if before.label() not in self._shown_phases:
                self._shown_phases.add(before.label())
                self.say(f"{before.label()} ...")
        before.done, before.of = row.get("done"), row.get("of")

    def current_activity(self) -> str:
        """The current phases of all processes, the longest first."""
        now = time.time()
        latest = {current.label(): current for current in self._activities.values()}
        if len(latest) > 1 or self._bar is not None:
            latest.pop(activity.STARTING_WORKERS, None)
        return "; ".join(a.text(now) for a in sorted(latest.values(), key=lambda a: a.since))

    def _show(self) -> None:
        text = self.current_activity()
        if self._bar is not None and self._live:
            self._bar.set_description_str(text or "rollouts")
        elif self._status is not None and text:
            elapsed = time.time() - self._started
            self._status.set_description_str(f"[{elapsed:5.0f}s] {text}")
        elif (
            text
            and not self._bar
            and not text.startswith(activity.RESERVING)
            and time.time() - self._last_line >= REPEAT_SECONDS
        ):
            self.say(f"still {text}")


def rollout_line(row: dict[str, Any]) -> str:
    """The main metrics of one rollout."""
    parts = [f"reward {row['rollout/reward_mean']:+.2f}"]
    if "rollout/accuracy" in row:
        parts.append(f"accuracy {row['rollout/accuracy']:.2f}")
    for key, name in (("actor_grad_norm_max", "grad"), ("kl", "kl")):
        if row.get(key) is not None:
            parts.append(f"{name} {row[key]:.3f}")
    parts.append(f"tokens {row['rollout/response_length_mean']:.0f}")
    return " ".join(parts)


def evaluation_line(row: dict[str, Any]) -> str:
    """The result of one evaluation."""
    text = f"held-out after rollout {row['global_step']}: "
    if "eval_accuracy" in row:
        text += f"accuracy {row['eval_accuracy']:.3f} +- {row['eval_accuracy_ci95']:.3f}, "
    return (
        text
        + f"mean reward {row['eval_reward_mean']:+.2f} on {row['eval_num_prompts']:.0f} prompts"
    )


def nonfinite_line(row: dict[str, Any]) -> str:
    """One line about a skipped optimizer step or dropped samples."""
    prompts = [f"prompt {index}" for index in row["prompts"]]
    if row["optimizer_step"] is None:
        what = f"{row['left_out']} responses dropped from the update"
    else:
        what = f"optimizer step {row['optimizer_step']} skipped, {row['in_a_row']} in a row"
    return (
        f"rollout {row['global_step']}: {what}: {row['cause']} not finite: "
        f"{listed(prompts, MAX_NAMED)} ({jsonl_log.NONFINITE})"
    )


def keep_worker_logs(session_dir: Path, run_dir: Path) -> None:
    """Copy the workers' output of a local Ray session into ``logs/``, with secrets hidden."""
    target = run_dir / LOGS
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted((session_dir / "logs").glob("worker-*")):
        if path.stat().st_size:
            text = path.read_bytes().decode("utf-8", "surrogateescape")
            shown = redact_text(text).encode("utf-8", "surrogateescape")
            (target / path.name).write_bytes(shown)
