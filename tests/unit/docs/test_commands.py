"""Every command in the pages is one that exists, with arguments that it takes.

The commands of the tutorials are also run, by the tests of each tutorial.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.measure.__main__ import NAMES as MEASUREMENTS
from sg_rlhf.__main__ import COMMANDS
from sg_rlhf.config import load_config
from tests.unit.command_parser import parser_of
from tests.unit.docs.page import ROOT
from tests.unit.outside_domains import registered

PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "lab/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    # These two tutorials name files that they write. Their tests run them.
    if page.name not in ("CHANGELOG.md", "2_first_weighting.md", "3_first_domain.md")
]
#: Packages of `python -m`: those of this repository, and others, whose arguments are not checked.
FOLDERS = {"eval", "lab", "sg_rlhf", "tests"}
OTHER_MODULES = {"molt", "openrlhf", "pip", "pytest", "verl", "vllm"}
_COMMAND = re.compile(r"\s*(\w+=\S+ )*(\.venv/bin/)?(sg-rlhf|python3?|bash|make) ")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
_OVERRIDE = re.compile(r"[a-z]\w*\.\S+=.*")


def code(page: Path) -> str:
    """The text of a page's shell and indented blocks, with continued lines joined."""
    lines, language = [], None
    for line in page.read_text().splitlines():
        if fence := re.match(r" *```(\w*)", line):
            language = fence[1] if language is None else None
        elif language in ("", "bash", "sh") or (language is None and line.startswith("    ")):
            lines.append(line)
    return re.sub(r"\\\n\s*", "", "\n".join(lines))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page, without variables, redirections and comments."""
    for line in code(page).splitlines():
        if not _COMMAND.match(line):  # other programs, output
            continue
        line = re.sub(r"\[(--[^\]]*)\]", r"\1", line)  # an optional part
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split, reader.commenters = True, "#"
        words = [word for word in reader if word != "..."]
        while _ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        end = next((at for at, word in enumerate(words) if re.match("[;<>|&]", word)), None)
        yield words[:end]


def parse(module: str, argv: list[str]) -> None:
    """Parse the arguments as the command does, and a recipe's keys with their values.

    Raises:
        SystemExit: it does not take them; the message is on stderr.
        ConfigError: no such key, or not that value.
    """
    load_config(None, [word for word in argv if _OVERRIDE.fullmatch(word)])
    # `lab.measure` takes these out before argparse sees them.
    argv = [word for word in argv if not _OVERRIDE.fullmatch(word)]
    parser = parser_of(module, argv)
    if "--help" not in argv:
        parser.parse_args(argv)


def check(words: list[str]) -> None:
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    module = rest[1] if program.startswith("python") and rest[0] == "-m" else ""
    if module == "lab.measure":
        module, rest = f"lab.measure.{rest[2].replace('-', '_')}", rest[1:]
    mains = {c.module.removesuffix(".command"): c.module for c in COMMANDS.values()}
    mains |= {"lab.study": "lab.study.command"}
    mains |= {m: m for m in (f"lab.measure.{n.replace('-', '_')}" for n in MEASUREMENTS)}
    mains |= {"eval.run": "sg_rlhf.eval.run"}
    if program == "sg-rlhf":
        name, *argv = rest
        assert name in COMMANDS, words
        parse(COMMANDS[name].module, argv)
    elif module in mains:
        parse(mains[module], rest[2:])
    elif module:
        ours = importlib.util.find_spec(module) if module.split(".")[0] in FOLDERS else None
        assert ours or module.split(".")[0] in OTHER_MODULES, words
    elif program == "make":
        targets = re.findall(r"^([\w.%/-]+):", (ROOT / "Makefile").read_text(), re.M)
        named = [word for word in rest if "=" not in word and not word.startswith(".cache/")]
        assert {*named} <= {*targets}, words
    else:
        assert (ROOT / rest[0]).is_file() or rest[0].startswith("$"), words
    for word in words:
        if word.startswith("configs/") and word.endswith(".yaml"):
            load_config(word)  # also by an older name
        elif word.startswith("configs/"):
            assert (ROOT / word).exists(), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domains = re.findall(r"^export SG_DOMAINS=(\S+)$", code(page), re.M)
    with registered(monkeypatch, domains[0]) if domains else contextlib.nullcontext():
        for words in commands(page):
            check(words)


def test_most_pages_have_commands() -> None:
    """The pattern finds them: a page whose commands are overlooked passes the test above."""
    found = {page.name: len([*commands(page)]) for page in PAGES}
    assert sum(found.values()) > 100 and found["commands.md"] >= len(COMMANDS)
