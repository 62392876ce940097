"""Samples of a rollout as a table, for the trackers that show tables."""

from __future__ import annotations

from typing import Any

COLUMNS = ("global_step", "prompt", "response", "reward", "advantage")


def table_rows(global_step: int, samples: list[dict[str, Any]]) -> list[list[Any]]:
    """Rows of ``COLUMNS``; ``response`` is the whole dialogue if there is one."""
    return [
        [global_step, row["prompt"], row.get("dialogue") or row["response"], row["reward"],
         row["advantage"]]
        for row in samples
    ]  # fmt: skip
