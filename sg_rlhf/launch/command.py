"""Print the job file of a recipe for SLURM, KubeRay or SkyPilot. Start nothing.

It asks for the machines, memory and disk that the recipe's plan names, and runs `sg-rlhf train`.
"""

from __future__ import annotations

import argparse
import sys

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.redaction import redact_text
from sg_rlhf.config import builtin_recipes
from sg_rlhf.launch import options as launch_options
from sg_rlhf.launch.job import job_file
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
    launch_options.add_arguments(parser)
    builtin_recipes.add_arguments(parser, required=True)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder of the run (default: runs/<domain>_<recipe>)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    try:
        options = launch_options.options_of(arguments)
        config = load_run(arguments.config, arguments.overrides, arguments.run_dir)
        text = job_file(
            config, configs=arguments.config, overrides=arguments.overrides, options=options
        )
    except ValueError as error:
        print(f"error: {as_typed(redact_text(str(error)))}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0
