"""Upstream's settings and its checks of them, read from its source without importing it.

OpenRLHF builds its argument parser inside ``if __name__ == "__main__"`` of
``openrlhf/cli/train_ppo_ray.py``, so it cannot be imported. This module splits that block with
:mod:`ast`: the statements before ``parser.parse_args()`` build the parser, those after it check the
arguments, the last one is ``train(args)``. It imports nothing heavy, so a recipe is checked in
milliseconds. Without OpenRLHF a table of its flags stands in (``upstream_flags.json``); a test
compares the two.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.algo.objectives import OBJECTIVES

TRAIN_SCRIPT = "cli/train_ppo_ray.py"
#: How upstream's checks get the function that nests the flags.
NESTING = "from openrlhf.utils.config import hierarchize"
SHIPPED = Path(__file__).with_suffix(".json")
#: OpenRLHF publishes a wheel for this Python alone. The rest of the package runs on newer ones.
PIPELINE_PYTHON = (3, 11)

#: Schedules of transformers that run with the arguments that upstream gives. The others need a
#: metric at each step, or the number of their decay steps.
SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
)  # fmt: skip
#: What the overlay adds to upstream's choices.
POLICY_LOSS_TYPES = ("weighted_ppo", *(n for n in OBJECTIVES if n != "ppo"))
KL_ESTIMATORS = ("wk3", "wk3_eq11")
#: Eq. 5 of arXiv 2511.00066: the mean over prompts of each one's token mean.
PROMPT_MEAN = "prompt-mean"
EXTRA_CHOICES = {
    "actor.policy_loss_type": POLICY_LOSS_TYPES,
    "actor.loss_agg_mode": (PROMPT_MEAN,),
    "algo.kl.estimator": KL_ESTIMATORS,
    "ds.param_dtype": ("fp32",),
    "actor.lr_scheduler": SCHEDULES,
    "critic.lr_scheduler": SCHEDULES,
}
#: Of these, the keys for which upstream takes any text.
ANY_TEXT = ("actor.lr_scheduler", "critic.lr_scheduler")


class UpstreamChanged(RuntimeError):
    """Upstream's source no longer has the shape that the overlay relies on."""


class UpstreamMissing(UpstreamChanged):
    """OpenRLHF is not installed."""


def upstream_root() -> Path:
    """Directory of the installed ``openrlhf`` package (not imported)."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        if sys.version_info[:2] != PIPELINE_PYTHON:
            raise UpstreamMissing(
                f"training needs Python 3.11, the only one with a wheel of OpenRLHF; this is "
                f"{sys.version_info[0]}.{sys.version_info[1]}. Run scripts/bootstrap.sh in a clone"
            )
        raise UpstreamMissing("OpenRLHF is not installed; run scripts/bootstrap.sh in a clone")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class MainBlock:
    """The three parts of upstream's main block."""

    build_parser: ast.Module
    validate: ast.Module
    path: Path


def _is_call(node: ast.stmt, text: str) -> bool:
    return ast.unparse(node) == text


@functools.cache
def main_block() -> MainBlock:
    """Split upstream's main block; raises :class:`UpstreamChanged` when its shape moved."""
    path = upstream_root() / TRAIN_SCRIPT
    tree = ast.parse(path.read_text(), filename=str(path))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    if len(blocks) != 1:
        raise UpstreamChanged(f"{path}: expected one `if __name__ == '__main__'` block")
    body = blocks[0].body
    cuts = [i for i, node in enumerate(body) if _is_call(node, "args = parser.parse_args()")]
    if len(cuts) != 1 or not _is_call(body[-1], "train(args)"):
        raise UpstreamChanged(
            f"{path}: expected `args = parser.parse_args()` once and `train(args)` last "
            "in the main block"
        )
    cut = cuts[0]
    return MainBlock(
        build_parser=ast.Module(body=body[:cut], type_ignores=[]),
        validate=ast.Module(body=body[cut + 1 : -1], type_ignores=[]),
        path=path,
    )


def build_parser() -> argparse.ArgumentParser:
    """Upstream's parser with the overlay's choices added."""
    from datetime import datetime

    block = main_block()
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    exec(compile(block.build_parser, str(block.path), "exec"), names)
    parser: argparse.ArgumentParser = names["parser"]
    by_dest = {action.dest: action for action in parser._actions}
    for dest, extra in EXTRA_CHOICES.items():
        action = by_dest.get(dest)
        if action is None or (action.choices is None) != (dest in ANY_TEXT):
            raise UpstreamChanged(f"{block.path}: flag --{dest} with choices is gone")
        action.choices = [*(action.choices or ()), *extra]
    return parser


def _nesting(script: Path) -> Any:
    """What :data:`NESTING` imports, from its file, which imports nothing.

    The package around it imports PyTorch and transformers: 4 seconds of a processor, which every
    start and every dry run would wait for.
    """
    path = script.parents[1] / "utils" / "config.py"
    return runpy.run_path(str(path))["hierarchize"]


def validate_args(args: argparse.Namespace) -> argparse.Namespace:
    """Run upstream's own argument checks; returns the nested namespace it trains with.

    Raises:
        AssertionError: upstream's own check, with its message.
    """
    block = main_block()
    names: dict[str, Any] = {"args": args, "argparse": argparse}
    checks = ast.Module(body=[], type_ignores=[])
    for node in block.validate.body:
        if ast.unparse(node) == NESTING:
            names["hierarchize"] = _nesting(block.path)
        else:
            checks.body.append(node)
    exec(compile(checks, str(block.path), "exec"), names)
    result: argparse.Namespace = names["args"]
    return result


@dataclass(frozen=True)
class Flag:
    """One upstream setting, as a recipe sees it."""

    dest: str
    kind: str  # "switch" | "value" | "list"
    type: Any
    choices: tuple[Any, ...] | None
    nargs: Any
    default: Any

    def describe(self) -> str:
        """The values that a recipe may set, in words."""
        if self.kind == "switch":
            return "true or false"
        name = {int: "an integer", float: "a number", str: "text"}.get(self.type, "a value")
        if self.choices:
            name = "one of " + ", ".join(map(str, self.choices))
        if self.kind == "list":
            count = f"{self.nargs} times " if isinstance(self.nargs, int) else ""
            return f"a list ({count}{name})"
        return name


@functools.cache
def flags() -> dict[str, Flag]:
    """Every upstream setting by its dotted key; from the shipped table without OpenRLHF."""
    try:
        parser = build_parser()
    except UpstreamMissing:
        return shipped_flags()
    table: dict[str, Flag] = {}
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._StoreFalseAction)):
            continue  # --no-X of a switch has the key of --X
        is_switch = isinstance(action, argparse._StoreTrueAction)
        kind = "switch" if is_switch else "value" if action.nargs is None else "list"
        table[action.dest] = Flag(
            dest=action.dest,
            kind=kind,
            type=action.type or str,
            choices=None if action.choices is None else tuple(action.choices),
            nargs=action.nargs,
            default=action.default,
        )
    return table


def as_json(table: dict[str, Flag]) -> str:
    """The shipped table as JSON: one line per flag, with upstream's choices alone.

    A default with the time of day is written without the time.
    """
    lines = []
    for dest, flag in table.items():
        entry = {k: v for k, v in vars(flag).items() if v is not None and k != "dest"}
        entry["type"] = flag.type.__name__
        if isinstance(flag.default, str):
            entry["default"] = re.sub(r"_\d{4}T\d\d:\d\d$", "", flag.default)
        if flag.choices:
            added = EXTRA_CHOICES.get(dest, ())
            entry["choices"] = [choice for choice in flag.choices if choice not in added]
        if dest in ANY_TEXT:
            del entry["choices"]
        lines.append(f"{json.dumps(dest)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def shipped_flags() -> dict[str, Flag]:
    """The shipped table, with the overlay's choices."""
    types = {kind.__name__: kind for kind in (int, float, str)}
    table = {}
    for dest, entry in json.loads(SHIPPED.read_text()).items():
        choices = (*entry.pop("choices", ()), *EXTRA_CHOICES.get(dest, ())) or None
        absent = {"nargs": None, "default": None}
        kind = types[entry.pop("type")]
        table[dest] = Flag(**{**absent, **entry, "dest": dest, "type": kind, "choices": choices})
    return table
