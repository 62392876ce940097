"""Shared code of the commands that measure checkpoints: options, recipe, batch, files."""

from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.measure import fixed_batch, rollouts
from lab.measure.checkpoint import (
    DTYPES,
    PASS_TOKENS,
    MeasureError,
    choose_device,
    load_model,
    load_tokenizer,
)
from lab.measure.fixed_batch import FixedBatch
from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.common.argument_types import (
    OneLineParser,
    non_negative_int,
    positive_float,
    positive_int,
)
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.resources import machine
from sg_rlhf.common.text import single_line
from sg_rlhf.config import Config, weighting_of
from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES
from sg_rlhf.data_io import strict_json
from sg_rlhf.tasks.reward import RewardFunc

Measured = TypeVar("Measured")

_OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)+=.*", re.DOTALL)


def new_parser(prog: str, description: str | None, examples: str) -> OneLineParser:
    """A parser with the options of every measurement on a batch; ``parse`` takes overrides."""
    parser = OneLineParser(
        prog=f"python -m {prog}",
        description=description,
        epilog=examples,
        allow_abbrev=False,
    )
    add_machine(parser)
    add_models(parser)
    add = parser.add_argument
    add("--config", metavar="FILE", action="append", help="a recipe (YAML); the later file wins")
    add(
        "--pass-tokens", type=positive_int, default=PASS_TOKENS, metavar="N",
        help=f"tokens in one forward pass; fewer need less memory [{PASS_TOKENS}]",
    )  # fmt: skip
    add("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    add = parser.add_argument_group("responses that are sampled").add_argument
    add("--data", type=Path, metavar="FILE", help="JSONL of prompts to answer (input, answer)")
    add("--prompts", type=positive_int, metavar="N", help="number of prompts [8]")
    add("--group", type=positive_int, metavar="G", help="responses per prompt [the recipe, 8]")
    add(
        "--max-new-tokens", type=positive_int, metavar="N",
        help="maximum tokens of a response [the recipe, 256]",
    )  # fmt: skip
    add(
        "--temperature", type=positive_float, metavar="T",
        help="sampling temperature [the recipe, 1.0]",
    )  # fmt: skip
    add("--seed", type=non_negative_int, default=0, help="seed of the sampling [0]")
    add("--reward", metavar="FILE", help="file or module:NAME with reward_func [the recipe]")
    return parser


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Where a measurement runs, and the file of its figures."""
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda [auto]")
    add("--threads", type=positive_int, metavar="N", help="CPU threads; 1 is best on busy cores")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def add_fixed_batch(parser: argparse.ArgumentParser) -> None:
    """A batch that is given or kept instead of sampled."""
    add = parser.add_argument_group(
        "a fixed batch",
        "--data may also hold responses: a run's samples.jsonl, or rows of prompt, response and "
        "advantage",
    ).add_argument
    add("--batch", type=Path, metavar="FILE", help="read the batch if FILE exists, else write it")
    add("--sampler", metavar="CKPT", help="model that samples the responses [the first --model]")
    add(
        "--global-step", type=non_negative_int, metavar="N",
        help="only this step's rows of a samples.jsonl",
    )  # fmt: skip


def add_dtype(parser: argparse.ArgumentParser, default: str, why: str) -> None:
    """The option ``--dtype``, whose default differs."""
    parser.add_argument("--dtype", choices=DTYPES, default=default, help=f"{why} [{default}]")


def add_models(parser: argparse.ArgumentParser) -> None:
    """The checkpoints that are measured."""
    parser.add_argument(
        "--model", nargs="+", required=True, metavar="CKPT", help="folders, hub ids or module:NAME"
    )


def parse(parser: OneLineParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; overrides may be anywhere, also after an option of several values."""
    overrides = [token for token in argv if _OVERRIDE.fullmatch(token)]
    args = parser.parse_args([token for token in argv if not _OVERRIDE.fullmatch(token)])
    if args.overrides:
        parser.error(
            f"{args.overrides[0]!r}: expected key=value with a key such as sg.weighting.upper"
        )
    args.overrides = overrides
    kept = getattr(args, "batch", None)
    if args.data is None and not (kept and kept.exists()):
        parser.error("--data FILE: not set; expected it, or --batch with a file that exists")
    prepare(parser, args)
    return args


def each_model(names: Sequence[str], measure: Callable[[str], Measured]) -> list[Measured]:
    """What was measured of each checkpoint, with one of them in memory at a time."""
    found = []
    for name in names:
        found.append(measure(name))
        gc.collect()  # modules refer to each other: without this two models can be in memory
    return found


def columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of aligned columns, the first at the left. Numbers are rounded; None is a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in cells
    ]


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set torch's threads, and refuse files that could not be written, before a measurement."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for option in ("batch", "json"):
        path = getattr(args, option, None)
        if path is None:
            continue
        if path.is_dir():
            parser.error(f"--{option} {path}: is a folder, expected a file")
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            parser.error(f"--{option} {path}: {parent} is no folder that can be written")


def recipe_weights(config: Config, overrides: Sequence[str]) -> Weighting | None:
    """The token weighting that the recipe trains with; None for plain GRPO, or without a recipe.

    An ``sg.`` override asks for a weighting, whatever the recipe's loss.

    Raises:
        MeasureError: a policy loss that is not the clipped surrogate.
    """
    if any(override.startswith("sg.") for override in overrides):
        return weighting_of(config)
    kind = config.value("actor.policy_loss_type")
    if kind not in ("ppo", "weighted_ppo"):
        raise MeasureError(
            f"actor.policy_loss_type={kind}: expected ppo or weighted_ppo, because "
            "this command measures the clipped surrogate"
        )
    return weighting_of(config) if kind in POLICY_LOSS_TYPES else None


def make_batch(args: argparse.Namespace, config: Config, *, graded: bool) -> FixedBatch:
    """The batch of the command line: read, re-encoded or sampled; written if ``--batch`` is new.

    graded: whether advantages are needed.
    """
    if args.batch is not None and args.batch.exists():
        return fixed_batch.load(args.batch)
    data = fixed_batch.read_data(args.data)
    sampler = args.sampler or args.model[0]
    tokenizer = load_tokenizer(sampler)
    settings = sampling(args, config)
    if fixed_batch.has_responses(data):
        batch = fixed_batch.from_responses(
            args.data, data, tokenizer, temperature=settings.temperature,
            global_step=args.global_step,
        )  # fmt: skip
    else:
        reward = reward_function(args, config, settings, graded=graded)
        model = load_model(sampler, torch.float32, choose_device(args.device))
        batch = rollouts.sample_batch(args.data, data, sampler, model, tokenizer, settings, reward)
    if graded:
        batch.advantages()
    if args.batch is not None:
        fixed_batch.save(batch, args.batch, tokenizer)
    return batch


def sampling(args: argparse.Namespace, config: Config) -> rollouts.Sampling:
    """How prompts are answered: options, else the recipe, else our defaults."""
    return rollouts.Sampling(
        prompts=args.prompts or 8,
        group=_setting(args.group, config, "rollout.n_samples_per_prompt", 8),
        temperature=_setting(args.temperature, config, "rollout.temperature", 1.0),
        max_new_tokens=_setting(args.max_new_tokens, config, "rollout.max_new_tokens", 256),
        seed=args.seed,
        advantage_std=config.sg.advantage_std,
    )


def reward_function(
    args: argparse.Namespace, config: Config, settings: rollouts.Sampling, *, graded: bool
) -> RewardFunc | None:
    """The reward of the options, else of the recipe; None without one."""
    reward = args.reward or config.values.get("reward.remote_url")
    if graded and reward is None:
        raise MeasureError(
            f"--data {args.data}: prompts without responses need a reward; expected --reward "
            "domain:kk (or another), a recipe with reward.remote_url, or "
            "--loss nll"
        )
    if graded and settings.group < 2:
        raise MeasureError(f"--group {settings.group}: expected 2 or more, for a group advantage")
    return rollouts.load_reward(str(reward)) if reward is not None else None


def _setting(option: Any, config: Config, key: str, default: Any) -> Any:
    """The option, else what the recipe (not upstream's default) says, else ours."""
    if option is not None:
        return option
    found = config.values.get(key)
    return default if found is None else found


def command(
    prog: str,
    parse_arguments: Callable[[Sequence[str]], argparse.Namespace],
    run: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    argv: Sequence[str] | None,
) -> int:
    """Parse, measure, write ``--json`` and print the table; 0, or 2 after one line on stderr."""
    given = sys.argv[1:] if argv is None else argv
    args = parse_arguments(given)
    try:
        report = {
            **run(args),
            "command": shlex.join(["python", "-m", prog, *given]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**machine(), "threads": torch.get_num_threads()},
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        if args.json is not None:
            write_whole(args.json, strict_json.dumps(report, indent=1) + "\n")
        print(table(report))
        return 0
    except torch.OutOfMemoryError:
        why = "out of GPU memory; expected a smaller --pass-tokens or --prompts"
    except (ValueError, OSError) as error:
        why = single_line(error)
    print(f"{prog}: {why}", file=sys.stderr)
    return 2
