"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: A cell for which there is no value.
EMPTY = "–"


def table_head(cells: Sequence[str]) -> list[str]:
    """The lines of a table's head."""
    return [table_row(cells), table_row(["---"] * len(cells))]


def table_row(cells: Iterable[object]) -> str:
    """One row."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
