"""Check whether this machine can run sg_rlhf. Print one line per check.

Each line says what was found, what is needed and what to do. Checked are GPUs, driver, memory,
shared memory, disk, compiler and cores. With a recipe, its memory plan, files, model and servers
are checked too. Before the installation `python3 -m sg_rlhf.doctor.preflight` checks the GPUs.
Exit status: 0 fine, 1 works with warnings, 2 cannot work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from sg_rlhf.common import home
from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.environment import as_typed
from sg_rlhf.config import builtin_recipes
from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import Needs, check, of_hardware
from sg_rlhf.machine import names
from sg_rlhf.machine.facts import Facts
from sg_rlhf.machine.gather import gather
from sg_rlhf.machine.gpus import hardware_name
from sg_rlhf.plan.load import load_run

EXAMPLES = """\
examples:
  check this machine
    sg-rlhf doctor
  check it for a recipe: GPUs, memory, disk for checkpoints, model and data
    sg-rlhf doctor --config configs/kk/grpo_qwen2.5-3b-instruct.yaml --hardware 8x80gb

SG_HARDWARE=8x80gb requires such hardware, SG_HARDWARE=cpu none.
docs/troubleshooting.md lists every check.
"""

_COLOURS = {OK: "32", WARNING: "33", FAILED: "31", SKIPPED: "2"}
#: Widest column; longer cells overflow and do not widen it.
_WIDEST = 34


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="sg-rlhf doctor", description=__doc__, epilog=EXAMPLES)
    builtin_recipes.add_arguments(parser)
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run directory, whose disk is checked (default: runs/<domain>_<recipe>)",
    )
    parser.add_argument("--json", action="store_true", help="print facts and checks as JSON")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status 0; 1 with warnings; 2 for a failed check or a usage error."""
    home.ensure()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        facts, needs, checks = _look(arguments)
    except ValueError as error:  # a recipe or SG_HARDWARE
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        result = {"facts": facts.model_dump(), "checks": [asdict(item) for item in checks]}
        print(json.dumps({**result, "verdict": verdict(checks, facts, needs)}, indent=2))
    else:
        print("\n".join(table(checks, use_colour(sys.stdout))))
        print(verdict(checks, facts, needs))
    return exit_status(checks)


def _look(arguments: argparse.Namespace) -> tuple[Facts, Needs, list[Check]]:
    """Facts, needs and the checks.

    Raises:
        ValueError: one line for the user.
    """
    needs = of_hardware(os.environ.get("SG_HARDWARE", ""))  # also refuses a wrong name
    if not arguments.config and not arguments.overrides:
        facts = gather(Path(arguments.run_dir or "runs"))
        return facts, needs, check(facts, needs)
    config = load_run(arguments.config or [], arguments.overrides, arguments.run_dir)
    facts = gather(Path(config.sg.run_dir or "."))
    cached = recipe.cached_model(*recipe.model_of(config)) is not None
    needs, plan = recipe.judge(config, facts, cached=cached)
    return facts, needs, [*check(facts, needs), *plan, *recipe.inputs(config, cached=cached)]


def use_colour(stream: TextIO) -> bool:
    """Whether to use colours: only on a terminal, never with NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(checks: Sequence[Check], colour: bool) -> list[str]:
    """One line per check: status, name, found, needed, what to do; remarks in brackets."""
    rows = [("", "", "found", "needed", "what to do")]
    for c in checks:
        remark = f"({c.remark})" if c.remark else ""
        last = as_typed(f"{c.remedy} {remark}".strip())
        rows.append((c.status, c.name, c.found, c.needed, last))
    widths = [min(_WIDEST, max(map(len, column))) for column in [*zip(*rows, strict=True)][:4]]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        if colour and row[0]:
            cells[0] = f"\x1b[{_COLOURS[row[0]]}m{cells[0]}\x1b[0m"
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return lines


def verdict(checks: Sequence[Check], facts: Facts, needs: Needs) -> str:
    """The last line: whether it works and, without a recipe, which models fit."""
    failed = [check.name for check in checks if check.status == FAILED]
    warned = [check.name for check in checks if check.status == WARNING]
    if failed:
        return f"cannot work: {', '.join(failed)}"
    works = f"works, with warnings: {', '.join(warned)}" if warned else "fine"
    if needs.recipe:
        return works
    name = hardware_name(facts.gpus)
    if not name:
        return works
    models = names.MODELS[names.largest_models(names.parse(name), facts.memory_gib)]
    return f"{works}; `sg-rlhf run` chooses --hardware {name} here: {models}"
