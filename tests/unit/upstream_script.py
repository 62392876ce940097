"""OpenRLHF's own parser and checks, which stand in the main block of its script.

It builds them inside ``if __name__ == "__main__"`` of ``openrlhf/cli/train_ppo_ray.py``, so they
cannot be imported. The tests compare ``sg_rlhf/config/upstream_flags.json`` and
``sg_rlhf/overlay/driver/arguments.py`` with them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import operator
from datetime import datetime
from typing import Any

from sg_rlhf.overlay.patches.version import upstream_root


@functools.cache
def _main_block() -> tuple[ast.Module, ast.Module]:
    """The statements before ``parser.parse_args()``, and those between it and ``train(args)``."""
    tree = ast.parse((upstream_root() / "cli/train_ppo_ray.py").read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    )
    lines = [ast.unparse(node) for node in block.body]
    cut = lines.index("args = parser.parse_args()")
    assert lines[-1] == "train(args)"
    return ast.Module(block.body[:cut], []), ast.Module(block.body[cut + 1 : -1], [])


def _executed(block: ast.Module, **names: Any) -> dict[str, Any]:
    exec(compile(block, "train_ppo_ray.py", "exec"), names)
    return names


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Upstream's parser."""
    names = _executed(_main_block()[0], argparse=argparse, datetime=datetime)
    built: argparse.ArgumentParser = names["parser"]
    return built


def defaults() -> dict[str, Any]:
    """Every flag with its default."""
    return vars(parser().parse_args([]))


def validated(flat: dict[str, Any]) -> dict[str, Any]:
    """The settings that upstream trains with, by their dotted keys.

    Raises:
        AssertionError: upstream refuses the settings.
    """
    names = _executed(_main_block()[1], args=argparse.Namespace(**flat))
    return {key: operator.attrgetter(key)(names["args"]) for key in flat}
