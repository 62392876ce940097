"""Types of command-line arguments, whose errors are one line, and a progress bar."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sg_rlhf.common.text import OneLineParser as OneLineParser

#: Largest whole number of a flag: the largest that a float represents exactly.
MAX_WHOLE_NUMBER = 2**53
_MAX_DIGITS = 100


def positive_int(text: str) -> int:
    """Argument type: a whole number, 1 or more."""
    return _whole(text, 1)


def int_list(text: str) -> tuple[int, ...]:
    """Argument type: whole numbers from 1 with commas between them; sorted, each once."""
    return tuple(sorted({_whole(part.strip(), 1) for part in text.split(",")}))


def non_negative_int(text: str) -> int:
    """Argument type: a whole number, 0 or more (such as a seed of numpy or torch)."""
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
    """The whole number from 0 that a text stands for; -1 for any other text.

    As in Python, digits of other scripts count. More digits than Python converts give -1.
    """
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else -1


def quoted(text: str) -> str:
    """A text for a one-line message: shortened, and as a repr where it is not printable."""
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short if short and short.isprintable() else repr(short)


def port(text: str) -> int:
    """Argument type: a TCP port, or 0 for any free one."""
    value = parse_int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a port, 0 to 65535")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Argument type: an object of JSON, such as {"enable_thinking": false}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{quoted(text)}: expected an object of JSON, such as {{"enable_thinking": false}}'
        )
    return value


def key_values(flag: str, words: Iterable[str], keys: Iterable[str]) -> dict[str, str]:
    """The KEY=VALUE words of a flag; ValueError, one line, for an unknown or repeated key."""
    known = list(keys)
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known or key in found:
            expected = ", ".join(known) or "no keys"
            raise ValueError(f"{flag} {word}: expected KEY=VALUE, each key once, of {expected}")
        found[key] = value
    return found


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a finite number above 0")
    return value


def non_negative_float(text: str) -> float:
    """Argument type: a finite number, 0 or more."""
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a finite number, 0 or more")
    return value


def fraction(text: str) -> float:
    """Argument type: a number from 0 to below 1."""
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
    """Argument type: a path that a file can have; it need not exist."""
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
    """Argument type: a name, not empty and printable."""
    if not text.strip() or not text.isprintable() or len(text) > 4096:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a name")
    return text


def progress_bar(description: str, unit: str, total: int | None = None) -> Any:
    """A progress bar on a terminal; nothing where stderr is no terminal."""
    return tqdm(desc=description, total=total, unit=f" {unit}", disable=None, leave=False)
