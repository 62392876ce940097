"""Types for command-line arguments, with errors of one line, and a progress bar."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sg_rlhf.common.text import OneLineParser as OneLineParser

#: Whole numbers that a flag may have: what floats count exactly, and no library's limit.
MAX_WHOLE_NUMBER = 2**53
_MOST_DIGITS = 100


def positive_int(text: str) -> int:
    """An argument type: how many of something."""
    return _whole(text, 1)


def int_list(text: str) -> tuple[int, ...]:
    """An argument type: several counts with commas between them, in order and each once."""
    found = [_whole(part.strip(), 1) for part in text.split(",")]
    return tuple(sorted(set(found)))


def non_negative_int(text: str) -> int:
    """An argument type: a whole number from 0 on, as numpy and torch want their seeds."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    value = parse_int(text)
    if value < least:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)}: expected a whole number, {least} or more"
        )
    if value > MAX_WHOLE_NUMBER:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected at most {MAX_WHOLE_NUMBER}")
    return value


def parse_int(text: str) -> int:
    """The whole number that a text is, from 0 on; -1 for anything else.

    Digits of other scripts are digits, as to Python; so many that Python refuses to convert them
    are none.
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1


def quoted(text: str) -> str:
    """What was given, for a message of one line."""
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short if short and short.isprintable() else repr(short)


def positive_float(text: str) -> float:
    """An argument type: a number above 0, such as a temperature or seconds."""
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a finite number above 0")
    return value


def non_negative_float(text: str) -> float:
    """An argument type: how much of something, from 0 on."""
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a finite number, 0 or more")
    return value


def fraction(text: str) -> float:
    """An argument type: a part of something, never all of it."""
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def path(text: str) -> Path:
    """An argument type: a path that a file can have, whether there is one or not."""
    try:
        text.encode()
        os.lstat(text or "\0")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a path ({reason})") from None
    return Path(text)


def printable_name(text: str) -> str:
    """An argument type: a name; neither empty nor with characters that no name has."""
    if not text.strip() or not text.isprintable() or len(text) > 4096:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a name")
    return text


def progress_bar(description: str, unit: str, total: int | None = None) -> Any:
    """A bar on a terminal, and nothing where stderr is not one."""
    return tqdm(desc=description, total=total, unit=f" {unit}", disable=None, leave=False)
