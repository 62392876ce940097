"""Estimate whether a recipe fits on a machine, and how long a rollout step takes. Start nothing.

Prints the memory of a GPU in each phase, of a node and on disk, the largest micro-batches that fit,
and the seconds per rollout step (a roofline model). Default: this machine, or the recipe's hardware
if this machine has no GPU. With the prompts here, also the time of the whole run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from sg_rlhf.common.argument_types import OneLineParser, positive_float
from sg_rlhf.config import Config, builtin_recipes
from sg_rlhf.config.checks import input_files, problems
from sg_rlhf.data_io import strict_json
from sg_rlhf.plan.load import load_for
from sg_rlhf.plan.of_recipe import plan_of
from sg_rlhf.plan.time import DEFAULT

EXAMPLES = """\
examples:
  a recipe on this machine, or on the one it is for
    sg-rlhf plan --config configs/kk/grpo_qwen2.5-3b-instruct.yaml
  the same on eight GPUs of 40 GB, with shorter responses
    sg-rlhf plan --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --hardware 8x40gb data.max_len=3072 rollout.max_new_tokens=2048
  as JSON for a script: exit status 0 if it fits, 1 if not
    sg-rlhf plan --config configs/math/grpo_dsr_qwen2.5-7b.yaml --json

hardware: cpu, or [NODESx]COUNTx and a size (24gb, 40gb, 80gb) or a type (h100, h200, l40s, ...):
8x80gb, 2x8xh100, 4xl40s. The recipe then has the settings of this hardware. All figures are
estimates; docs/gpu.md has the formulas' sources and what was checked.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="sg-rlhf plan", description=__doc__, epilog=EXAMPLES)
    builtin_recipes.add_arguments(parser, hardware_too=False)
    parser.add_argument(
        "--hardware", metavar="NAME", help="a machine other than this one, such as 8x40gb"
    )
    parser.add_argument(
        "--response-tokens",
        metavar="N",
        type=positive_float,
        help="mean length of a response for the time (default: a quarter of the longest)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where the recipe does not fit; 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    if not arguments.config:
        return _fail("--config: not set; give a recipe (`sg-rlhf recipes` lists them)")
    tokens = arguments.response_tokens
    if tokens is not None and tokens < 1:
        return _fail(f"--response-tokens {tokens:g}: expected 1 or more")
    try:
        config, machine = load_for(arguments.config, arguments.overrides, arguments.hardware)
        plan = plan_of(
            config,
            hardware=machine,
            why=f"--hardware {arguments.hardware}",
            rollouts=_rollouts(config),
            assumptions=replace(DEFAULT, response_tokens=tokens),
        )
    except ValueError as error:
        return _fail(str(error))
    if plan is None:
        model = config.value("actor.model_name_or_path")
        if not model:
            return _fail("actor.model_name_or_path: not set; give a model id or a local folder")
        return _fail(
            f"actor.model_name_or_path={model}: its shape is not known here; give its "
            "folder, or one of the models of sg_rlhf/plan/model_configs.json"
        )
    print(strict_json.dumps(plan.as_json()) if arguments.json else "\n".join(plan.lines()))
    for line in problems(config):
        print(f"sg-rlhf plan: train refuses this recipe: {line}", file=sys.stderr)
    return 0 if plan.memory.fits else 1


def _rollouts(config: Config) -> int | None:
    """Rollout steps of the whole run; None if the prompts are not all here."""
    prompts = input_files.count_prompts(config)
    if prompts is None:
        return None
    per_epoch = prompts // config.value("rollout.batch_size")
    return per_epoch * config.value("train.num_episodes") or None


def _fail(message: str) -> int:
    print(f"sg-rlhf plan: {' '.join(message.split())}", file=sys.stderr)
    return 2
