"""Command-line options that several scripts of this folder have."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any


def add(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add shared options by name, such as `"--data-dir"`."""
    known: dict[str, dict[str, Any]] = {
        "--data-dir": {"type": Path, "required": True, "help": "folder of the parquet files"},
        "--out": {"type": Path, "required": True, "help": "file of the result"},
        "--seed": {"type": int, "default": 0, "help": "seed of what is made at random [0]"},
        "--workers": {"type": int, "default": 2, "help": "grading processes [2]"},
        "--date": {"default": datetime.date.today().isoformat(), "help": "in the result [today]"},
    }
    for name in names:
        parser.add_argument(name, **known[name])
