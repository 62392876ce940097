"""Check whether this machine can run sg_rlhf. Print one line per check.

Each line says what was found, what is needed and what to do. Checked are GPUs, driver, memory,
shared memory, disk, compiler and cores. With a recipe, its memory plan, files, model and servers
are checked too. Before the installation, `python3 -m sg_rlhf.doctor` checks driver and GPUs alone.
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

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.config import builtin_recipes
from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import Check, exit_status
from sg_rlhf.doctor.checks import Needs, check, of_hardware
from sg_rlhf.doctor.facts import Facts, gather, read
from sg_rlhf.doctor.report import table, use_colour, verdict

EXAMPLES = """\
examples:
  check this machine
    python -m sg_rlhf.doctor
  check it for a recipe: GPUs, memory, disk for checkpoints, model and data
    python -m sg_rlhf.doctor --config configs/kk/grpo_qwen2.5-3b-instruct.yaml --hardware 8x80gb
  check another machine: collect its facts there, check them here
    python -m sg_rlhf.doctor --json > machine.json
    python -m sg_rlhf.doctor --facts machine.json --config configs/kk/grpo_1xgpu.yaml

SG_HARDWARE=8x80gb requires such hardware, SG_HARDWARE=cpu none.
docs/troubleshooting.md lists every check.
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(
        prog="python -m sg_rlhf.doctor",
        description=__doc__,
        epilog=EXAMPLES,
    )
    builtin_recipes.add_arguments(parser)
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run directory, whose disk is checked (default: runs/<domain>_<recipe>)",
    )
    parser.add_argument("--json", action="store_true", help="print facts and checks as JSON")
    parser.add_argument(
        "--facts", metavar="FILE", help="check the machine that this JSON file describes"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    # Intermixed: overrides may come before and after options.
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status 0; 1 with warnings; 2 for a failed check or a usage error."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        facts, needs, checks = _look(arguments)
    except ValueError as error:  # a recipe, a description or SG_HARDWARE
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
    described = read(Path(arguments.facts)) if arguments.facts else None
    if not arguments.config and not arguments.overrides:
        facts = described or gather(Path(arguments.run_dir or "runs"))
        return facts, needs, check(facts, needs)
    run = recipe.load(arguments.config or [], arguments.overrides, arguments.run_dir)
    facts = described or gather(run.run_dir)
    cached = not described and recipe.cached_model(run.model, run.revision) is not None
    needs, plan = recipe.judge(run, facts, cached=cached)
    inputs = [] if described else recipe.inputs(run, cached=cached)
    return facts, needs, [*check(facts, needs), *plan, *inputs]
