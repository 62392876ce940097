"""The parser of a command, without running the command."""

from __future__ import annotations

import argparse
import importlib
from typing import Any


class _Built(BaseException):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(module: str, argv: list[str]) -> argparse.ArgumentParser:
    """The parser of a module's `main`, taken when it is about to parse these words."""
    original = argparse.ArgumentParser.parse_known_args

    def take(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if not self.add_help:  # a first look at one option, which decides about the others
            return original(self, *args, **kwargs)
        raise _Built(self)

    main = importlib.import_module(module).main
    argparse.ArgumentParser.parse_known_args = take  # type: ignore[method-assign]
    try:
        main(argv)
    except _Built as built:
        return built.parser
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    raise AssertionError(f"{module}.main does not parse its arguments")
