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
    """A result as JSON; its folder is made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
