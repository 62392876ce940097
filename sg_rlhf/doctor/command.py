"""What this machine lacks, before anything is downloaded or started: a line a check.

Found, needed, what to do, for driver, GPUs, CUDA toolkit, memory, shared memory, disk, Python,
compiler, limits, ports, hub; with a recipe also for its model, data and memory plan. Any Python of
3.8 or later runs it from a checkout; nothing has to be installed. Exit status: 0 fine, 1 works but
for the warnings, 2 cannot work.
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
from sg_rlhf.doctor.needs import Needs, of_hardware
from sg_rlhf.doctor.report import coloured, table, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = """\
examples:
  this machine, before anything is installed
    python3 -m sg_rlhf.doctor
  this machine for a recipe: GPUs, memory, disk for its checkpoints, model and data
    python -m sg_rlhf.doctor --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
  another machine: take its facts there, judge them here
    python3 -m sg_rlhf.doctor --json > machine.json
    python -m sg_rlhf.doctor --facts machine.json --config configs/kk/grpo_sg_1xgpu.yaml

SG_HARDWARE=8x80gb asks for such hardware, SG_HARDWARE=cpu for none. docs/doctor.md has every check.
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
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
        help="judge the machine for this recipe; given again, the later file wins key by key",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where the run would be written (default: runs/<domain>_<recipe>)",
    )
    parser.add_argument("--json", action="store_true", help="print the facts and the checks")
    parser.add_argument(
        "--facts", metavar="FILE", help="judge the machine that this JSON describes, not this one"
    )
    parser.add_argument(
        "--install",
        choices=("cpu", "cuda"),
        help="only what would make installing these packages useless, each problem a line on "
        "stderr, and nothing else (scripts/bootstrap.sh asks so)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    # An override may stand behind an option that stands behind another override.
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 with warnings, 2 when it cannot work or the command line is wrong."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        facts, needs, more = _look(arguments)
    except ValueError as error:  # a recipe, a description or SG_HARDWARE
        print(f"error: {error}", file=sys.stderr)
        return 2
    checks = [*check(facts, needs), *more]
    if arguments.install:
        for one in checks:
            if one.status in (WARNING, FAILED):
                kind = "" if one.status == FAILED else "warning: "
                print(f"bootstrap: {kind}{one.line()}", file=sys.stderr)
    elif arguments.json:
        found = {"facts": facts.to_json(), "checks": [one.to_json() for one in checks]}
        print(json.dumps({**found, "verdict": verdict(checks, facts, needs)}, indent=2))
    else:
        print("\n".join(table(checks, coloured(sys.stdout))))
        print(verdict(checks, facts, needs))
    return exit_status(checks)


def _look(arguments: argparse.Namespace) -> tuple[Facts, Needs, list[Check]]:
    """The facts, the needs, and checks that are made of more than these.

    Raises:
        ValueError: one line for the user.
    """
    named = os.environ.get("SG_HARDWARE", "")
    asked = of_hardware(named)  # a wrong name is refused with a recipe too, which has its own
    if arguments.install:
        gpus = 0 if named == "cpu" else None
        needs = replace(of_hardware("cuda"), install=arguments.install, gpus=gpus)
        return _facts(arguments, Wanted(hub=False, seconds=5.0)), needs, []
    if not arguments.config and not arguments.overrides:
        wanted = Wanted(run_dir=Path(arguments.run_dir or "runs"))
        return _facts(arguments, wanted), asked, []
    missing = _missing_for_recipes()
    if missing:
        remedy = "scripts/bootstrap.sh, then .venv/bin/sg-rlhf doctor (or pip install .)"
        skipped = Check("recipe", SKIPPED, missing, "the packages that read recipes", remedy)
        return _facts(arguments, Wanted()), asked, [skipped]
    from sg_rlhf.doctor import recipe

    run = recipe.load(arguments.config or [], arguments.overrides, arguments.run_dir)
    facts = _facts(arguments, run.wanted())
    return facts, *recipe.judge(run, facts)


def _facts(arguments: argparse.Namespace, wanted: Wanted) -> Facts:
    return read(Path(arguments.facts)) if arguments.facts else gather(wanted)


def _missing_for_recipes() -> str:
    """What keeps this Python from reading recipes; "" if nothing."""
    if sys.version_info < (3, 11):
        return f"Python {sys.version.split()[0]} is not 3.11"
    try:
        import sg_rlhf.config  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sg_rlhf"):
            raise
        return f"{error.name} is not installed"
    return ""
