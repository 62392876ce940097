"""Logs of a run directory: JSON lines that survive kills and can be cut back when resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sg_rlhf.common.atomic_io import append_whole, write_whole
from sg_rlhf.data_io import strict_json

METRICS = "metrics.jsonl"
OPTIMIZER_STEPS = "optimizer_steps.jsonl"
SAMPLES = "samples.jsonl"
EVALUATIONS = "eval/eval.jsonl"
NONFINITE = "nonfinite.jsonl"
STEP_FILES = (METRICS, OPTIMIZER_STEPS, SAMPLES, EVALUATIONS, NONFINITE)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows and fsync: all of them or none.

    Raises:
        OSError: they cannot be written. The file is unchanged.
    """
    append_whole(path, "".join(strict_json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    """All complete rows. A line that a kill cut off is skipped."""
    return _rows(path.read_bytes()) if path.exists() else []


def damaged(path: Path) -> list[int]:
    """Numbers, from 1, of the lines that :func:`read` skips."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [number for number, line in enumerate(lines, 1) if _row(line) is None]


def _rows(lines: bytes) -> list[dict[str, Any]]:
    return [row for line in lines.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # of JSON or of UTF-8
        return None
    return row if isinstance(row, dict) else None


class Tail:
    """Follows a growing file: gives each new row once, when its line is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows written since the last call. An incomplete line is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return _rows(whole)


def drop_after(run_dir: Path, global_step: int) -> None:
    """Delete rows of rollout steps after ``global_step``: a resumed run writes them again."""
    for name in STEP_FILES:
        path = run_dir / name
        if not path.exists():
            continue
        kept = [row for row in _rows(path.read_bytes()) if row.get("global_step", 0) <= global_step]
        text = "".join(strict_json.dumps(row) + "\n" for row in kept)
        if text.encode() != path.read_bytes():
            write_whole(path, text, sync=True)
