"""What the pages say of commands, flags and files is so."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from sg_rlhf.__main__ import COMMANDS, names_behind
from sg_rlhf.launch import options

ROOT = Path(__file__).parents[3]
#: The changelog tells of older days.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = [
    path
    for folder in ("sg_rlhf", "eval", "configs", "scripts", "bench", "docker", "examples")
    for kind in ("py", "yaml", "sh", "Dockerfile")
    for path in sorted(ROOT.glob(f"{folder}/**/*.{kind}"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for first, second in re.findall(r"sg-rlhf ([a-z][\w-]*)(?: ([a-z][\w-]*))?", page.read_text()):
        grouped = f"{first} {second}" in COMMANDS
        assert first in COMMANDS or grouped or (not second and first in names_behind()), (
            f"{page.name}: sg-rlhf {first} {second}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:sg_rlhf|eval|bench|tests)[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module.rstrip(".")), f"{page.name}: python -m {module}"


def test_pages_that_the_code_names_exist() -> None:
    assert len(SOURCES) > 300
    for source in SOURCES:
        text = source.read_text()
        for name in re.findall(r"\bdocs/[a-z_]+\.md\b", text):
            assert (ROOT / name).exists(), f"{source}: {name}"
        # Decisions by number were of notes that are in no page.
        assert not re.search(r"\.md,? D\d", text), source


def test_flags_of_job_files() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"--print"}
    page = (ROOT / "docs" / "running.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `--") and "NAME" in line]
    rows += [line for line in page.splitlines() if line.startswith("| `--time")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z]+) [A-Z]", row.split("|")[1])}
    assert named == flags
    words = {3: "Three", 4: "Four", 5: "Five", 6: "Six"}
    assert f"{words[len(flags)]} flags set the most common ones" in page


def test_what_the_plain_installation_has() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    row = next(line for line in page.splitlines() if "`pip install .`" in line)
    plain = [name for name, command in COMMANDS.items() if not command.extra]
    assert [name for name in plain if f"`{name}" not in row] == []


def test_minutes_of_the_tests() -> None:
    (minutes,) = re.findall(r"^test: .*: (\d+) minutes", (ROOT / "Makefile").read_text(), re.M)
    assert f"(the tests {minutes})" in (ROOT / "docs" / "gpu.md").read_text()
