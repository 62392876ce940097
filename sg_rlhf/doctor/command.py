"""Check whether this machine can run sg_rlhf. Print one line per check.

Each line says what was found, what is needed and what to do. Checked are driver, GPUs, CUDA
toolkit, memory, shared memory, disk, Python, compiler, limits, ports and hub. With a recipe, its
model, data and memory plan are checked too. Python 3.8 or later runs this from a checkout, with
nothing installed. Exit status: 0 fine, 1 works with warnings, 2 cannot work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.common.text import OneLineParser
from sg_rlhf.doctor.check import FAILED, SKIPPED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.facts import Facts, read
from sg_rlhf.doctor.gather import Wanted, gather
from sg_rlhf.doctor.needs import ANY_GPUS, Needs, of_hardware
from sg_rlhf.doctor.report import coloured, table, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = """\
examples:
  check this machine, before anything is installed
    python3 -m sg_rlhf.doctor
  check it for a recipe: GPUs, memory, disk for checkpoints, model and data
    python -m sg_rlhf.doctor --config configs/kk/grpo_qwen2.5-3b-instruct.yaml --hardware 8x80gb
  check another machine: collect its facts there, check them here
    python3 -m sg_rlhf.doctor --json > machine.json
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="check the machine for this recipe; may be repeated, the later file wins",
    )
    # As builtin_recipes.add_arguments, which is not importable before an installation.
    for flag, example in (("algorithm", "grpo_sg"), ("hardware", "4x40gb")):
        parser.add_argument(
            f"--{flag}",
            dest="config",
            action="append",
            type=f"{flag}:{{}}".format,
            metavar="NAME",
            help=f"{flag} to put on top of the recipe, such as {example}",
        )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run directory, whose disk is checked (default: runs/<domain>_<recipe>)",
    )
    parser.add_argument("--json", action="store_true", help="print facts and checks as JSON")
    parser.add_argument(
        "--facts",
        metavar="FILE",
        help="check the machine that this JSON file describes",
    )
    parser.add_argument(
        "--install",
        choices=("cpu", "cuda"),
        help="only check the needs of this installation, and print only problems, one per "
        "line on stderr (for scripts/bootstrap.sh)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    # Intermixed: overrides may come before and after options.
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status 0; 1 with warnings; 2 for a failed check or a usage error."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        facts, needs, more = _look(arguments)
    except ValueError as error:  # a recipe, a description or SG_HARDWARE
        print(f"error: {error}", file=sys.stderr)
        return 2
    checks = [*check(facts, needs), *more]
    if arguments.install:
        for item in checks:
            if item.status in (WARNING, FAILED):
                kind = "" if item.status == FAILED else "warning: "
                print(f"bootstrap: {kind}{item.line()}", file=sys.stderr)
    elif arguments.json:
        result = {"facts": facts.to_json(), "checks": [item.to_json() for item in checks]}
        print(json.dumps({**result, "verdict": verdict(checks, facts, needs)}, indent=2))
    else:
        print("\n".join(table(checks, coloured(sys.stdout))))
        print(verdict(checks, facts, needs))
    return exit_status(checks)


def _look(arguments: argparse.Namespace) -> tuple[Facts, Needs, list[Check]]:
    """Facts, needs, and the checks that need more than these (the memory plan).

    Raises:
        ValueError: one line for the user.
    """
    hardware = os.environ.get("SG_HARDWARE", "")
    needed = of_hardware(hardware)  # also refuses a wrong name where a recipe has its own needs
    if arguments.install:
        gpus = 0 if hardware == "cpu" else None
        needs = replace(of_hardware(ANY_GPUS), install=arguments.install, gpus=gpus)
        return _facts(arguments, Wanted(hub=False, seconds=5.0)), needs, []
    if not arguments.config and not arguments.overrides:
        wanted = Wanted(run_dir=Path(arguments.run_dir or "runs"))
        return _facts(arguments, wanted), needed, []
    missing = _missing_for_recipes()
    if missing:
        remedy = "scripts/bootstrap.sh, then .venv/bin/sg-rlhf doctor (or pip install .)"
        skipped = Check("recipe", SKIPPED, missing, "the packages that read recipes", remedy)
        return _facts(arguments, Wanted()), needed, [skipped]
    from sg_rlhf.doctor import recipe

    run = recipe.load(arguments.config or [], arguments.overrides, arguments.run_dir)
    facts = _facts(arguments, run.wanted())
    return facts, *recipe.judge(run, facts)


def _facts(arguments: argparse.Namespace, wanted: Wanted) -> Facts:
    return read(Path(arguments.facts)) if arguments.facts else gather(wanted)


def _missing_for_recipes() -> str:
    """Why this Python cannot read recipes; "" if it can."""
    if sys.version_info < (3, 11):
        return f"Python {sys.version.split()[0]} is not 3.11"
    try:
        import sg_rlhf.config  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sg_rlhf"):
            raise
        return f"{error.name} is not installed"
    return ""
