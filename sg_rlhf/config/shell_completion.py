"""The completion script of a shell: commands, their options, and the keys of a recipe.

    bash  eval "$(sg-rlhf completion bash)"     in ~/.bashrc
    zsh   eval "$(sg-rlhf completion zsh)"      in ~/.zshrc, behind compinit

The shell then asks ``sg-rlhf`` itself at every tab (argcomplete), so a new option or key needs no
new script.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from sg_rlhf.config.builtin_recipes import CONFIGS

SHELLS = ("bash", "zsh")


def main(argv: list[str] | None = None) -> int:
    """Print the script; exit status 0, or 2 for a shell that is neither."""
    parser = argparse.ArgumentParser(
        prog="sg-rlhf completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    import argcomplete

    print(argcomplete.shellcode(["sg-rlhf"], shell=shell))
    return 0


def complete(typed: list[str], rest: list[str], module: str | None, names: list[str]) -> NoReturn:
    """Answer the shell's question, which is in the environment, and end the process.

    Args:
        typed: the finished words that name the command, without the program.
        rest: the finished words behind them.
        module: the command's, if they name one; it has a ``main``.
        names: what can follow them, if they do not.
    """
    import argcomplete

    if module:
        parser = _parser_of(module, rest)
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=names)
    for action in parser._actions:
        if action.dest == "config":
            action.completer = _recipes  # type: ignore[attr-defined]
        if action.dest == "overrides":
            action.completer = _overrides  # type: ignore[attr-defined]
    os.environ["_ARGCOMPLETE"] = str(1 + len(typed))  # the words that are not the parser's
    argcomplete.autocomplete(parser)
    raise SystemExit(0)


class _Built(BaseException):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _parser_of(module: str, argv: list[str]) -> argparse.ArgumentParser:
    """The parser of a command, taken when its ``main`` is about to parse these words.

    Raises:
        ModuleNotFoundError: a package that the command needs is not installed.
    """

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


def _recipes(prefix: str, **_about: Any) -> Iterator[str]:
    """YAML files, and folders to go on in; the shipped recipes where there is no ``configs``."""
    from argcomplete.completers import FilesCompleter

    if not Path("configs").exists():
        yield from (f"configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml"))
    yield from FilesCompleter(("yaml", "yml"))(prefix)


def _overrides(prefix: str, **_about: Any) -> Iterator[str]:
    """``key=`` of every key of a recipe, and behind it the values that the key can have."""
    from sg_rlhf.config.sg_settings import sg_keys
    from sg_rlhf.config.upstream_flags import flags

    key, equals, _ = prefix.partition("=")
    table = flags()
    if not equals:
        yield from (f"{name}=" for name in (*table, *sg_keys()))
    elif key in table:
        flag = table[key]
        values = ("true", "false") if flag.kind == "switch" else flag.choices or ()
        yield from (f"{key}={value}" for value in values)
