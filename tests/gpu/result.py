"""What a stage found: checks with their limits, and figures; written after each of them.

The stage's process writes the record as it goes, so that a crash or the time limit loses nothing;
the runner adds where and when, and puts it into the results.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StageSkippedError(Exception):
    """The stage cannot run here; its message says why."""


@dataclass(frozen=True)
class Job:
    """How a stage runs.

    Attributes:
        device: ``cuda``, or ``cpu`` to try the stage's own code.
        small: sizes for seconds on a CPU.
        model: a folder or hub id for the stage that needs a trained model, or None.
        scratch: a folder for its files, deleted afterwards.
        overrides: key=value of the recipe, after the stage's own.
    """

    device: str
    small: bool
    model: str | None
    scratch: Path
    overrides: tuple[str, ...] = ()

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"


class Record:
    """Checks and figures of one stage, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self.skipped: str | None = None
        self.error: str | None = None
        self._write()

    def check(self, name: str, passed: bool, found: Any = None, limit: Any = None) -> None:
        """A claim that holds or not."""
        self._add(name, "passed" if passed else "failed", found, limit)

    def within(self, name: str, found: float, limit: float, case: str | None = None) -> None:
        """A figure that must not exceed a limit; NaN does. case: where it was found."""
        self._add(name, "passed" if found <= limit else "failed", found, limit, case)

    def goal(self, name: str, found: float, goal: float) -> None:
        """A figure that we want to be at most so much; more is no failure."""
        self._add(name, "met" if found <= goal else "not met", found, goal)

    def skip(self, name: str, why: str) -> None:
        """A part that cannot run here."""
        self.checks.append({"name": name, "status": "skipped", "why": why})
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """A measurement without a limit."""
        self.figures[name] = value
        self._write()

    def end(self, *, skipped: str | None = None, error: str | None = None) -> None:
        """The stage did not run, or it raised."""
        self.skipped, self.error = skipped, error
        self._write()

    def _add(self, name: str, status: str, found: Any, limit: Any, case: Any = None) -> None:
        entry = {"name": name, "status": status}
        more = {"found": found, "limit": limit, "case": case}
        entry |= {key: value for key, value in more.items() if value is not None}
        self.checks.append(entry)
        self._write()

    def _write(self) -> None:
        state = {
            "checks": self.checks,
            "figures": self.figures,
            "skipped": self.skipped,
            "error": self.error,
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(plain(state), allow_nan=False))
        os.replace(partial, self._path)


def plain(value: Any) -> Any:
    """The value as JSON has it: NaN and infinities by their names, other objects by theirs."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def summary(record: dict[str, Any], ended: str | None) -> tuple[str, str]:
    """(passed, failed or skipped; why or how much) of a record.

    Args:
        ended: how the process ended otherwise than by itself, or None.
    """
    checks = record["checks"]
    failed = [check for check in checks if check["status"] == "failed"]
    if record["skipped"]:
        return "skipped", record["skipped"]
    if ended or record["error"]:
        return "failed", ended or record["error"]
    if failed:
        first = failed[0]
        found = f": found {first.get('found')}, limit {first.get('limit')}"
        found += f" ({first['case']})" if "case" in first else ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return "failed", first["name"] + (found if "found" in first else "") + more
    done = sum(check["status"] in ("passed", "met", "not met") for check in checks)
    if not done:
        return "skipped", "; ".join(check["why"] for check in checks) or "nothing to check"
    left_out = len(checks) - done
    return "passed", f"{done} checks" + (f", {left_out} skipped" if left_out else "")
