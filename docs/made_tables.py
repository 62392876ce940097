"""Tables of a page that a script makes, each between ``<!-- table: NAME -->`` and its end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

#: Of each name the lines of Markdown.
Tables = Mapping[str, Callable[[], list[str]]]


def with_tables(page: str, tables: Tables) -> str:
    """The page with its tables as they are made now."""
    for name, make in tables.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        assert page.count(begin) == page.count(end) == 1, f"the page has no place for {name}"
        lines = "\n".join(make())
        page = re.sub(
            f"{begin}.*?{end}",
            lambda _, text=lines, a=begin, b=end: f"{a}\n{text}\n\n{b}",
            page,
            flags=re.DOTALL,
        )
    return page


def main(
    path: Path,
    tables: Mapping[str, Callable[[], list[str]]],
    draw: Callable[[], None] | None = None,
) -> int:
    """Write the page and draw its picture; with ``--check`` neither.

    Returns:
        Exit status 0; 1 where ``--check`` finds that the page would be another.
    """
    page = path.read_text()
    made = with_tables(page, tables)
    if "--check" in sys.argv[1:]:
        if made != page:
            print(f"docs/{path.name}: its tables are out of date: python {sys.argv[0]}")
        return int(made != page)
    path.write_text(made)
    if draw is not None:
        draw()
    return 0
