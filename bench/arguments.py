"""What the benchmarks' commands have in common: numbers they take, and where a result goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number, ``least`` or more."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {least} or more, not {text}"
            )
        return found

    return number


def write(result: dict[str, Any], out: Path) -> None:
    """Write a result as JSON; make its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_json(result))


def as_json(result: dict[str, Any]) -> str:
    """A result as JSON with one entry per line, and one line per entry of a long entry."""
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {_lines(v)}" for k, v in result.items()) + "\n}\n"


def _lines(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 160 or not isinstance(value, dict | list):
        return text
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(v, ensure_ascii=False)}" for v in value) + "\n ]"
    lines = (f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
    return "{\n" + ",\n".join(lines) + "\n }"
