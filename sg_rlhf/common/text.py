"""Text for people: one-line errors, values in messages, sizes, Markdown tables."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from sg_rlhf.common.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: A cell of a table for which there is no value.
EMPTY = "–"
#: An option of OpenRLHF's own command line.
_UPSTREAM_FLAG = re.compile(r"--\w+(\.\w+)+").fullmatch
#: Seconds without output after which a command says what it waits for.
SLOW_S = 2.0


class OneLineError(ValueError):
    """An error whose message has no line breaks, even if a key or value that it quotes has some."""

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line.

    If the command takes a recipe, the line also says how a recipe and its keys are written. Help
    keeps the lines of its description and its examples.
    """

    _words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; keeps the words for :meth:`error`."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}{self._recipe_hint()}; see --help\n")

    def _recipe_hint(self) -> str:
        if not any(action.dest == "overrides" for action in self._actions):
            return ""
        words = ["", *self._words, "-"]
        for index, word in enumerate(words):
            key, _, value = word.partition("=")
            if _UPSTREAM_FLAG(key):
                following = words[index + 1]
                value = value or ("true" if following.startswith("-") else following)
                shown = redact(key[2:], value)
                return f"; write a recipe's key without dashes: {key[2:]}={shown}"
            loose = words[index - 1] != "--config" and not word.startswith("--")
            if loose and word.endswith((".yaml", ".yml")):
                return f"; write a recipe as --config {word}"
        return ""


def removed(name: str, why: str) -> str:
    """The line that refuses a command, an option or a key that is gone."""
    return f"{name}: removed, because {why}"


class Removed(argparse.Action):
    """An option that is gone; ``const`` is the reason and the remedy."""

    def __init__(self, option_strings: list[str], dest: str, const: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, "?", const, help=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(removed(self.option_strings[0], str(self.const)))


@contextlib.contextmanager
def notice_if_slow(what: str) -> Iterator[None]:
    """Print on stderr what takes so long if the block takes longer than ``SLOW_S``."""
    timer = threading.Timer(SLOW_S, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def single_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def truncate(value: object, limit: int = 120) -> str:
    """A value's repr for an error message, at most ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listed(items: Sequence[str], limit: int) -> str:
    """The first ``limit`` items with commas, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{', '.join(items[:limit])}{more}"


def format_bytes(number: float) -> str:
    """Bytes for people, in steps of 1,000: 64.6 GB."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.0f} {units[0]}" if number >= 100 else f"{number:.3g} {units[0]}"


def table_head(cells: Sequence[str]) -> list[str]:
    """The two lines of a Markdown table's head."""
    return [table_row(cells), table_row(["---"] * len(cells))]


def table_row(cells: Iterable[object]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
