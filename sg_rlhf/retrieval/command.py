"""What the commands of this package share: one-line errors and exit status 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and whose help keeps its examples' lines."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def positive(text: str) -> int:
    """An argument type: an integer of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least 1")
    return value


def not_negative(text: str) -> int:
    """An argument type: an integer of at least 0."""
    return 0 if text == "0" else positive(text)


def share(text: str) -> float:
    """An argument type: how much of something a process has, from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a finite number of at least 0")
    return value


def setting(text: str) -> tuple[str, int]:
    """An argument type: NAME=N, N an integer of at least 1."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdecimal() and int(value)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=N, N an integer of at least 1")
    return name, int(value)


def port(text: str) -> int:
    """An argument type: a TCP port, or 0 for any free one."""
    value = not_negative(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a port, 0 to 65535")
    return value


def run(name: str, action: Callable[[], None]) -> int:
    """Call `action`; 0, or 2 after one line on stderr for what the user can put right."""
    try:
        action()
    except (ValueError, OSError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
