"""Shared by the commands of this package: one-line errors and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from sg_rlhf.common.argument_types import MAX_WHOLE_NUMBER, OneLineParser, parse_int, quoted

#: More than a machine has cores; a number of another kind was meant.
MAX_THREADS = 4096


class Parser(OneLineParser):
    """An argument parser that takes no abbreviated options."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
        )


def setting(text: str) -> tuple[str, int]:
    """An argument type: NAME=N, N an integer of at least 1."""
    name, _, number = text.partition("=")
    value = parse_int(number)
    if not name.isidentifier() or not 1 <= value <= MAX_WHOLE_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)}: expected NAME=N, N a whole number from 1"
        )
    return name, value


def threads(text: str) -> int:
    """An argument type: how many threads or processes to start."""
    value = parse_int(text)
    if not 1 <= value <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected 1 to {MAX_THREADS}")
    return value


def run(name: str, action: Callable[[], None]) -> int:
    """Call `action`. Returns 0, or 2 after one line on stderr for a user's error.

    `action` imports torch and faiss, whose threads then sleep while they wait for one another.
    """
    # Spinning, their default, takes the cores that the awaited threads need once other processes
    # (a training run) share the machine: a batch then takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        action()
    except (ValueError, OSError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
