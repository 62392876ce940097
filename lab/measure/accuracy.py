"""Measure the accuracy of checkpoints from many responses to each prompt.

A training run logs one or two responses per prompt, so the difference of two runs is mostly
sampling noise. This command samples every prompt many times. It prints the mean of each data source
with two intervals, and each checkpoint's difference to the first one, paired by prompt.

The first interval is over prompts: how far the score would move on other prompts. The second is
over responses alone: the noise of this measurement on the same prompts. More --samples narrow it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.measure import fixed_batch, options, rollouts
from lab.measure.checkpoint import MeasureError, choose_device, load_model, load_tokenizer
from sg_rlhf.common.argument_types import (
    OneLineParser,
    non_negative_int,
    positive_float,
    positive_int,
)
from sg_rlhf.common.statistics import Z95, half_width
from sg_rlhf.tasks.reward import RewardFunc

PROG = "lab.measure.accuracy"
EXAMPLES = """\
examples:
  the shipped tiny model on held-out puzzles, by size
    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 distinct=names
    python -m lab.measure.accuracy --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/test.jsonl
  two checkpoints, on held-out and on training prompts
    python -m lab.measure.accuracy --model runs/a/checkpoints/final runs/b/checkpoints/final \\
        --data held_out=data/kk_tiny/test.jsonl train=data/kk_tiny/train.jsonl --prompts 150 \\
        --samples 16 --json out/accuracy.json
Larger models: `python -m eval.run --suite kk` generates with vLLM.
"""
#: Responses that are sampled at a time. The samples depend on it, so it is no option.
AT_A_TIME = 512
#: Figures of a data source that are printed.
COLUMNS = (
    "accuracy", "ci95", "draws_ci95", "difference", "difference_ci95", "difference_draws_ci95",
)  # fmt: skip


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its long help."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = parser.add_argument
    options.add_models(parser)
    add(
        "--data", nargs="+", required=True, metavar="[NAME=]FILE",
        help="JSONL of sg_rlhf.data: input, answer, and datasource if there are several",
    )  # fmt: skip
    add(
        "--reward", default="domain:kk", metavar="FILE",
        help="file or module:NAME whose reward_func reports `correct` [Knights & Knaves]",
    )  # fmt: skip
    add("--prompts", type=positive_int, metavar="N", help="the first N of each file [all]")
    add("--samples", type=positive_int, default=8, metavar="N", help="responses per prompt [8]")
    add("--temperature", type=positive_float, default=0.7, metavar="T", help="[0.7]")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N", help="[256]")
    add("--seed", type=non_negative_int, default=0, help="seed of the sampling [0]")
    options.add_machine(parser)
    args = parser.parse_args(argv)
    options.prepare(parser, args)
    named = [_named(text) for text in args.data]
    args.data = dict(named)
    if len(args.data) < len(named):
        parser.error("--data: two files of one name; expected NAME=FILE with a name for each")
    return args


def _named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator else (Path(text).stem, Path(text))


def correct_counts(
    args: argparse.Namespace,
    name: str,
    data: Mapping[str, Sequence[Mapping[str, Any]]],
    reward: RewardFunc,
) -> dict[str, list[int]]:
    """Count one checkpoint's correct responses to each prompt of each set."""
    tokenizer = load_tokenizer(name)
    model = load_model(name, torch.float32, choose_device(args.device))
    settings = rollouts.Sampling(
        group=args.samples, temperature=args.temperature, max_new_tokens=args.max_new_tokens,
        seed=args.seed, at_a_time=AT_A_TIME,
    )  # fmt: skip
    counts = {key: [0] * len(rows) for key, rows in data.items()}
    for key, rows in data.items():
        path = args.data[key]
        answers = rollouts.answers(path, rows, model, tokenizer, settings, reward)
        for i, answer in enumerate(answers):
            correct = answer.found["extra_logs"].get("correct")
            if correct is None:
                raise MeasureError(
                    f"--reward {args.reward}: reports no `correct` in extra_logs; expected it, as "
                    "domain:kk does"
                )
            counts[key][i // args.samples] += int(correct)
    return counts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every checkpoint; return the content of ``--json``."""
    sets = {name: fixed_batch.read_data(path)[: args.prompts] for name, path in args.data.items()}
    reward = rollouts.load_reward(args.reward)
    measured = options.each_model(args.model, lambda name: correct_counts(args, name, sets, reward))
    return {
        "samples": args.samples,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "data": {key: str(path) for key, path in args.data.items()},
        "models": [
            {
                "model": name,
                "sets": {
                    key: figures(counts, measured[0][key], sources(sets[key]), args.samples)
                    for key, counts in by_set.items()
                },
            }
            for name, by_set in zip(args.model, measured, strict=True)
        ],
    }


def sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each row's ``datasource``; "all" where it has none."""
    return [str(row.get("datasource", "all")) for row in rows]


def figures(
    counts: Sequence[int], first: Sequence[int], sources: Sequence[str], samples: int
) -> dict[str, Any]:
    """Accuracy of one checkpoint on one set, over all prompts and by source.

    Args:
        counts: correct responses to each prompt.
        first: those of the checkpoint that this one is compared with.
        sources: of each prompt.
        samples: responses to each prompt.
    """
    found: dict[str, Any] = {}
    for source in dict.fromkeys(["all", *sources]):
        places = [i for i, name in enumerate(sources) if source in ("all", name)]
        shares = [counts[i] / samples for i in places]
        differences = [(counts[i] - first[i]) / samples for i in places]
        draws = draws_half_width([counts[i] for i in places], samples)
        others = draws_half_width([first[i] for i in places], samples)
        found[source] = {
            "accuracy": statistics.fmean(shares),
            "ci95": half_width(shares),
            "draws_ci95": draws,
            "difference": statistics.fmean(differences),
            "difference_ci95": half_width(differences),
            "difference_draws_ci95": math.hypot(draws, others),
            "prompts": len(places),
        }
    return {**found, "correct": list(counts)}


def draws_half_width(counts: Sequence[int], samples: int) -> float:
    """Half of the 95 % interval of the accuracy on the same prompts; NaN for one response each.

    The variance of a prompt's share is estimated by p (1 - p) / (samples - 1), without bias.
    """
    if samples < 2:
        return math.nan
    variance = math.fsum(c / samples * (1 - c / samples) / (samples - 1) for c in counts)
    return Z95 * math.sqrt(variance) / len(counts)


def table(result: dict[str, Any]) -> str:
    """The printed tables."""
    lines = []
    for key, path in result["data"].items():
        models = result["models"]
        lines.append(
            f"{key}: {models[0]['sets'][key]['all']['prompts']} prompts of {path} x "
            f"{result['samples']} responses at temperature {result['temperature']:g}"
        )
        cells: list[list[Any]] = [["", "", "accuracy", "+-", "draws", "difference", "+-", "draws"]]
        for place, model in enumerate(models):
            for source, found in model["sets"][key].items():
                if source != "correct":
                    values = [found[name] for name in COLUMNS]
                    row = [None if math.isnan(value) else f"{value:.3f}" for value in values]
                    cells.append(
                        [model["model"], source, *row[:3], *(row[3:] if place else [""] * 3)]
                    )
        lines += [*options.columns(cells), ""]
    lines.append(
        "+-: half of the 95 % interval over prompts; draws: over the sampled responses to the same "
        "prompts\ndifference: to the first checkpoint, paired by prompt"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    return options.command(PROG, parse_arguments, run, table, argv)


if __name__ == "__main__":
    sys.exit(main())
