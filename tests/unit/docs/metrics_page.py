"""The names in docs/metrics.md. ``{n}`` stands for what changes in a name."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def names(kind: str) -> list[str]:
    """What the tables name in their first column.

    Args:
        kind: the heading of that column: ``metric``, ``key`` or ``file``.
    """
    found, heading, before = [], "", ""
    for line in PAGE.read_text().splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        if line.startswith("|") and not before.startswith("|"):
            heading = first
        elif heading == kind:
            found += re.findall(r"`([^`]+)`", first)
        before = line
    return list(dict.fromkeys(found))


def is_on_the_page(name: str, kind: str = "metric") -> bool:
    """Whether the page has the name, or a pattern of it."""
    return any(pattern(known).fullmatch(name) for known in names(kind))


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(name)))
