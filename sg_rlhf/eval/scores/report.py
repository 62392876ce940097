"""Reports in Markdown: the same text is a file and the terminal's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.data_io import strict_json


def section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}", "", *lines])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [*table_head(heads), *map(table_row, rows)]


def interval(ci95: Sequence[float], style: str = ".3f") -> str:
    low, high = ci95
    return f"{low:{style}} to {high:{style}}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = strict_json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(path, f"{text}\n")


def write_markdown(path: Path, parts: Iterable[str]) -> None:
    write_whole(path, "\n\n".join(parts) + "\n")


def show(console: Console, parts: Iterable[str], files: Iterable[Path] = ()) -> None:
    """Print a report, and where its files are."""
    # `--help` does without them.
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    report = Markdown("")
    # By default rich leaves out HTML, and so <think> in a system prompt.
    report.parsed = (
        MarkdownIt("commonmark", {"html": False}).enable("table").parse("\n\n".join(parts))
    )
    console.print(report)
    for path in files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
