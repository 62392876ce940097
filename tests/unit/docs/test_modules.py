"""Paths and modules of ours that a page names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: In code, as text or as a block; NAME and braces stand for several.
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_PATH = re.compile(r"(?<![\w./-])(?:sg_rlhf|overlay)(?:/\w+)+(?:\.\w+|/)?(?![\w{])")
_MODULE = re.compile(r"(?<![\w./-])sg_rlhf(?:\.\w+)+(?![\w{])")


def exists(path: str) -> bool:
    """A file or a folder; ``overlay/...`` is short for ``sg_rlhf/overlay/...``."""
    return (ROOT / path).exists() or (ROOT / "sg_rlhf" / path).exists()


def names_of(file: Path) -> set[str]:
    """What a module defines or imports."""
    nodes = ast.walk(ast.parse(file.read_text()))
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = set()
    for node in nodes:
        if isinstance(node, defined):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def is_module(dotted: str) -> bool:
    """A package or a module, or a name in one."""
    path = ROOT
    parts = dotted.split(".")
    for index, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
            continue
        file = (path / part).with_suffix(".py")
        if file.is_file():
            return index + 1 == len(parts) or parts[index + 1] in names_of(file)
        init = path / "__init__.py"
        return init.is_file() and part in names_of(init)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_exist(page: Path) -> None:
    code = " ".join(block[0] for block in _CODE.finditer(page.read_text()))
    paths = {path for path in _PATH.findall(code) if "NAME" not in path}
    modules = {name for name in _MODULE.findall(code) if not name.endswith((".egg", ".py"))}
    assert [path for path in sorted(paths) if not exists(path)] == []
    assert [name for name in sorted(modules) if not is_module(name)] == []


def test_a_missing_one_is_found() -> None:
    assert exists("sg_rlhf/common/text.py") and exists("overlay/patches")
    assert is_module("sg_rlhf.common.text.truncate") and is_module("sg_rlhf.algo")
    assert not exists("sg_rlhf/common/one_line.py")
    assert not is_module("sg_rlhf.common.one_line") and not is_module("sg_rlhf.common.text.short")
