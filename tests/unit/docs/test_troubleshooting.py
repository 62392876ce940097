"""Every message that docs/troubleshooting.md explains is one that the code prints."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


def strings(path: Path) -> list[str]:
    """The constant texts of a module; those of an f-string with ``...`` for what it inserts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@functools.cache
def printed() -> str:
    """Every text that the code may print."""
    modules = ROOT.glob("sg_rlhf/**/*.py")
    scripts = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/scripts/*.sh")]
    texts = [text for path in modules for text in strings(path)]
    return "\n".join([*texts, *(path.read_text() for path in scripts)])


def quoted() -> list[str]:
    """Every message in the first column of the tables of messages.

    Cells that do not begin with a message describe a symptom in words.
    """
    messages: list[str] = []
    inside = False
    for line in PAGE.read_text().splitlines():
        inside = line.startswith("| message |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            messages += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return [re.sub(r"^(bootstrap|stopped|failed): ", "", message) for message in messages]


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) > 50


@pytest.mark.parametrize("message", quoted())
def test_message_is_printed_by_the_code(message: str) -> None:
    for fragment in re.split(r"\s*\.\.\.\s*", message):
        fragment = fragment.strip()
        assert not fragment or fragment in printed(), fragment
