"""Puzzles of our own in the shape of the official K&K files: tests hold none of the real data."""

from __future__ import annotations

import json
from pathlib import Path

from sg_rlhf.tasks.kk.puzzle import generate


def write_puzzle_files(folder: Path, sizes: range = range(2, 9), per_size: int = 100) -> Path:
    """Write `people{n}_num100.jsonl` for each size."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        rows = [
            {
                "quiz": puzzle.quiz,
                "names": list(puzzle.names),
                "solution": list(puzzle.solution),
                "solution_text_format": puzzle.solution_text_format,
                "statements": repr(puzzle.statements),
            }
            for puzzle in generate(size, per_size, seed=7)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"people{size}_num100.jsonl").write_text(text)
    return folder
