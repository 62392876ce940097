"""Shared by the commands of this package: one-line errors and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from sg_rlhf.common.argument_types import OneLineParser, parse_int, quoted


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser that takes no abbreviated options."""
    return OneLineParser(prog=name, description=description, epilog=epilog, allow_abbrev=False)


def setting(text: str) -> tuple[str, int]:
    """An argument type: NAME=N, N an integer of at least 1; faiss counts in 32 bits."""
    name, _, number = text.partition("=")
    value = parse_int(number)
    if not name.isidentifier() or not 1 <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected NAME=N, N from 1 to {2**20}")
    return name, value


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
