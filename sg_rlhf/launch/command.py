"""Print the job file of a recipe for SLURM, KubeRay or SkyPilot. Start nothing.

It asks for the machines, memory and disk that the recipe's plan names, and runs `sg-rlhf train`.
"""

from __future__ import annotations

import argparse
import re
import sys

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.config import builtin_recipes
from sg_rlhf.launch.job import TEMPLATES, USED_BY, LaunchError, Options, job_file
from sg_rlhf.plan.load import load_run

EXAMPLES = """\
examples:
  SLURM, one machine of eight GPUs
    sg-rlhf launch sbatch --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml \\
        --partition gpu --time 12:00:00 > job.sbatch
  KubeRay, two machines
    sg-rlhf launch kuberay --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml \\
        --hardware 2x8x80gb > job.yaml
  SkyPilot, with another learning rate
    sg-rlhf launch skypilot --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml \\
        actor.adam.lr=2e-6 > job.yaml
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="sg-rlhf launch", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("kind", choices=list(TEMPLATES), help=", ".join(TEMPLATES))
    parser.add_argument(
        "--image", metavar="NAME",
        help="container image to run in (default: none; kuberay: our own)",
    )  # fmt: skip
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit (sbatch, kuberay)")
    parser.add_argument("--partition", metavar="NAME", help="SLURM's partition (sbatch)")
    parser.add_argument("--account", metavar="NAME", help="SLURM's account (sbatch)")
    builtin_recipes.add_arguments(parser, required=True)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder of the run (default: runs/<domain>_<recipe>)"
    )
    return parser.parse_intermixed_args(argv)


def options_of(arguments: argparse.Namespace) -> Options:
    """The options, checked.

    Raises:
        LaunchError: a value that cannot be in this job file.
    """
    given = {name: getattr(arguments, name) for name in USED_BY if getattr(arguments, name)}
    for name, value in given.items():
        if arguments.kind not in USED_BY[name]:
            raise LaunchError(f"--{name} {value}: {arguments.kind} has no place for it")
        if not re.fullmatch(r"[\w./:@,+-]+", value, re.ASCII):
            raise LaunchError(f"--{name} {value!r}: expected a name without spaces or quotes")
    if "time" in given and not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", given["time"]):
        raise LaunchError(f"--time {given['time']}: expected HH:MM:SS or D-HH:MM:SS")
    options = Options(kind=arguments.kind, **given)
    if options.seconds == 0:  # to SLURM it means no limit, to Kubernetes nothing valid
        raise LaunchError(f"--time {options.time}: expected more than no time")
    return options


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    try:
        options = options_of(arguments)
        config = load_run(arguments.config, arguments.overrides, arguments.run_dir)
        text = job_file(
            config, configs=arguments.config, overrides=arguments.overrides, options=options
        )
    except ValueError as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0
