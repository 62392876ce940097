"""Errors of one line, whatever stands in the names and values that they quote."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sg_rlhf.common.redaction import redact

#: An option of OpenRLHF's own command line.
_UPSTREAMS_FLAG = re.compile(r"--\w+(\.\w+)+").fullmatch


class OneLineError(ValueError):
    """An error whose message has no line breaks, also where a key or a value has some."""

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others of its command.

    Of a command that takes a recipe, the line also says how a recipe and its keys are written.
    """

    _words: Sequence[str] = ()

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; keeps the words for :meth:`error`."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit status 2."""
        name = self.prog.replace("python -m ", "")  # the doctor runs on Python 3.8, too
        self.exit(2, f"{name}: {message}{self._how_to_write()}; see --help\n")

    def _how_to_write(self) -> str:
        if not any(action.dest == "overrides" for action in self._actions):
            return ""
        words = ["", *self._words, "-"]
        for place, word in enumerate(words):
            key, _, value = word.partition("=")
            if _UPSTREAMS_FLAG(key):
                following = words[place + 1]
                value = value or ("true" if following.startswith("-") else following)
                shown = redact(key[2:], value)
                return f"; write a recipe's key without dashes: {key[2:]}={shown}"
            loose = words[place - 1] != "--config" and not word.startswith("--")
            if loose and word.endswith((".yaml", ".yml")):
                return f"; write a recipe as --config {word}"
        return ""
