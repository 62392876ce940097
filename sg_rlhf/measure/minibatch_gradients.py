"""What a weighting does to the gradient of one and the same minibatch, many times over.

Training runs of two algorithms part after their first update, and from then on luck of the samples
is in every comparison. Here every algorithm's gradient is taken at the same parameters on the same
minibatches, sampled and graded as in training, at ratio 1. What differs is the algorithm's alone:

    size       ||g|| over the baseline's, minibatch by minibatch: a constant is a step size
    cosine     between both gradients: 1 is the same direction
    spread     std / mean of ||g|| over minibatches, which no step size changes
    peak       largest ||g|| over the median one, likewise

docs/sharpness.md explains how to read the numbers. The KL term is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from sg_rlhf.common.command_line import progress_bar
from sg_rlhf.common.files import write_whole
from sg_rlhf.config import Config, load_config
from sg_rlhf.measure import fixed_batch
from sg_rlhf.measure import options as common
from sg_rlhf.measure.batch_loss import BatchLoss, Surrogate
from sg_rlhf.measure.checkpoint import (
    DTYPES,
    MeasureError,
    choose_device,
    load_model,
    load_tokenizer,
)
from sg_rlhf.measure.fixed_batch import FixedBatch
from sg_rlhf.measure.sample_batch import Sampling, sample_batch
from sg_rlhf.measure.sharpness import surrogate_of

EXAMPLES = """\
examples:
  GRPO-SG in its forms beside GRPO, on the shipped tiny model
    python -m sg_rlhf.data kk --out data/kk_tiny --generate people=2-3 per_size=160
    python -m sg_rlhf.measure.minibatch_gradients --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/train.jsonl --reward module:sg_rlhf.tasks.kk.reward --batches 30 \\
        --algorithm configs/algorithms/grpo.yaml configs/algorithms/grpo_sg*.yaml
  a trained checkpoint, with the sampling of its recipe
    python -m sg_rlhf.measure.minibatch_gradients --model runs/a/checkpoints/final \\
        --data data/kk/train.jsonl --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --algorithm configs/algorithms/grpo.yaml configs/algorithms/grpo_sg.yaml --json out/g.json
"""
#: Resamples of the minibatches for an interval, and the fewest minibatches that get one.
RESAMPLES, LEAST = 2000, 8


@dataclass(frozen=True)
class Measured:
    """One algorithm: ||g|| of each minibatch, and the cosine with the baseline's gradient."""

    name: str
    surrogate: str
    norms: list[float]
    cosines: list[float]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
    parser = common.new_parser("sg_rlhf.measure.minibatch_gradients", __doc__, EXAMPLES)
    parser.add_argument("--model", required=True, metavar="CKPT", help="folder, id or module:NAME")
    parser.add_argument(
        "--algorithm",
        nargs="+",
        required=True,
        metavar="FILE",
        help="recipes of algorithms (configs/algorithms); the first one is the baseline",
    )
    parser.add_argument(
        "--batches",
        type=common.count,
        default=20,
        metavar="N",
        help="minibatches of --prompts x --group responses, of the next prompts each [20]",
    )
    common.add_dtype(parser, "float32", "of the parameters and of all arithmetic")
    args = common.parse(parser, argv)
    for option in ("batch", "sampler", "limit", "global_step"):
        if getattr(args, option) is not None:
            parser.error(f"--{option.replace('_', '-')}: not taken here, where batches are sampled")
    return args


def surrogates(paths: Sequence[str]) -> dict[str, Surrogate]:
    """The loss of each recipe, by its file's name.

    Raises:
        MeasureError: a loss that is not the clipped surrogate with a weight of p, or a name twice.
    """
    found: dict[str, Surrogate] = {}
    for path in paths:
        name = Path(path).stem
        if name in found:
            raise MeasureError(f"--algorithm {path}: a second {name}; expected other file names")
        try:
            found[name] = surrogate_of(load_config([path], []), [])
        except MeasureError as error:
            raise MeasureError(f"--algorithm {path}: {error}") from None
    return found


def gradient(model: PreTrainedModel, loss: BatchLoss) -> Tensor:
    """The gradient of a minibatch over all parameters as one vector, [D]."""
    model.zero_grad(set_to_none=True)
    for piece in loss():
        piece.backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def compare(
    model: PreTrainedModel, batch: FixedBatch, losses: dict[str, Surrogate], pass_tokens: int
) -> dict[str, tuple[float, float]]:
    """By algorithm: ||g|| on this minibatch, and the cosine with the first algorithm's g."""
    found: dict[str, tuple[float, float]] = {}
    baseline: Tensor | None = None
    for name, surrogate in losses.items():
        vector = gradient(model, BatchLoss(model, batch, surrogate, pass_tokens=pass_tokens))
        if baseline is None:
            baseline = vector
        norm, other = (
            float(torch.linalg.vector_norm(v, dtype=torch.float64)) for v in (vector, baseline)
        )
        product = float((vector * baseline).sum(dtype=torch.float64))
        found[name] = (norm, product / (norm * other) if norm * other else float("nan"))
    return found


def measure(
    args: argparse.Namespace, config: Config, settings: Sampling, losses: dict[str, Surrogate]
) -> tuple[list[Measured], int]:
    """Every algorithm on every minibatch; and how many minibatches had no gradient at all.

    Raises:
        MeasureError: too few prompts, or fewer than two minibatches with a gradient.
    """
    data = fixed_batch.read_data(args.data)
    prompts = settings.prompts
    if fixed_batch.has_responses(data):
        raise MeasureError(f"--data {args.data}: rows with responses; expected prompts to answer")
    if len(data) < prompts * args.batches:
        raise MeasureError(
            f"--data {args.data}: {len(data)} prompts; expected {prompts * args.batches} for "
            f"--batches {args.batches} of --prompts {prompts}"
        )
    reward = common.reward_function(args, config, settings, graded=True)
    model = load_model(args.model, DTYPES[args.dtype], choose_device(args.device))
    tokenizer = load_tokenizer(args.model)
    rows: list[dict[str, tuple[float, float]]] = []
    with progress_bar("minibatches", "minibatches", args.batches) as bar:
        for number in range(args.batches):
            part = data[number * prompts : (number + 1) * prompts]
            drawn = replace(settings, seed=settings.seed + number)
            batch = sample_batch(args.data, part, args.model, model, tokenizer, drawn, reward)
            if any(row.advantage for row in batch.rows):
                rows.append(compare(model, batch, losses, args.pass_tokens))
            bar.update()
    if len(rows) < 2:
        raise MeasureError(
            f"--data {args.data}: {len(rows)} of {args.batches} minibatches had prompts that were "
            "answered right and wrong; expected at least 2 (more --batches, --prompts or --group)"
        )
    found = [
        Measured(name, s.describe(), [row[name][0] for row in rows], [row[name][1] for row in rows])
        for name, s in losses.items()
    ]
    return found, args.batches - len(rows)


def spread(norms: np.ndarray, axis: int = -1) -> Any:
    """std / mean."""
    return norms.std(axis=axis, ddof=1) / norms.mean(axis=axis)


def _relative_spread(norms: np.ndarray, baseline: np.ndarray, axis: int = -1) -> Any:
    return spread(norms, axis) / spread(baseline, axis)


def peak(norms: np.ndarray, axis: int = -1) -> Any:
    """Largest over median."""
    return norms.max(axis=axis) / np.median(norms, axis=axis)


def summarise(found: Sequence[Measured], seed: int = 0) -> list[dict[str, Any]]:
    """A row per algorithm; intervals are 95 % percentile bootstraps over minibatches, paired."""
    baseline = np.array(found[0].norms)
    rows = []
    for entry in found:
        norms = np.array(entry.norms)
        ratio = norms / baseline
        row: dict[str, Any] = {
            "algorithm": entry.name,
            "loss": entry.surrogate,
            "norm_mean": float(norms.mean()),
            "size": float(ratio.mean()),
            "size_range": [float(ratio.min()), float(ratio.max())],
            "cosine": float(np.mean(entry.cosines)),
            "cosine_min": float(np.min(entry.cosines)),
            "spread": float(spread(norms)),
            "peak": float(peak(norms)),
        }
        if entry is not found[0]:
            row["spread_over_baseline"] = float(_relative_spread(norms, baseline))
            if len(norms) >= LEAST:
                interval = stats.bootstrap(
                    (norms, baseline), _relative_spread, paired=True, vectorized=True,
                    method="percentile", n_resamples=RESAMPLES, rng=np.random.default_rng(seed),
                ).confidence_interval  # fmt: skip
                row["spread_over_baseline_ci95"] = [float(interval.low), float(interval.high)]
        rows.append(row)
    return rows


def table(report: dict[str, Any]) -> str:
    """The text that people read."""
    rows = report["algorithms"]
    width = max(len(row["algorithm"]) for row in rows)
    without = report["without_gradient"]
    lines = [
        f"{report['minibatches']} minibatches of {report['prompts']} prompts x {report['group']}, "
        f"temperature {report['temperature']:g}, {report['model']}"
        + (f"; {without} more had no gradient" if without else ""),
        "",
        f"{'':{width}}  mean ||g||   size (range)           cosine (least)   spread"
        "   over baseline's        peak",
    ]
    for row in rows:
        low, high = row["size_range"]
        over = ""
        if "spread_over_baseline" in row:
            over = f"{row['spread_over_baseline']:.3f}"
        if "spread_over_baseline_ci95" in row:
            over += " ({:.3f}, {:.3f})".format(*row["spread_over_baseline_ci95"])
        lines.append(
            f"{row['algorithm']:{width}}  {row['norm_mean']:10.4g}   {row['size']:.3f} "
            f"({low:.3f}, {high:.3f})   {row['cosine']:.4f} ({row['cosine_min']:.4f})   "
            f"{row['spread']:6.3f}   {over:22} {row['peak']:5.2f}"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"size: ||g|| over {rows[0]['algorithm']}'s on the same minibatch. spread: std / mean",
            "of ||g|| over minibatches, divided by the baseline's with a 95 % bootstrap interval.",
            "peak: largest ||g|| over the median one.",
        ]
    )


def plot(found: Sequence[Measured], figure: Any) -> None:
    """||g|| of each minibatch over the baseline's: on a line, if only the scale differs."""
    axes = figure.add_subplot()
    baseline = found[0]
    ends = [min(baseline.norms), max(baseline.norms)]
    axes.plot(ends, ends, color="0.4", lw=1, ls="--", label=f"{baseline.name}: y = x")
    for entry in found[1:]:
        axes.plot(baseline.norms, entry.norms, ".", label=entry.name)
    axes.set(
        xlabel=f"||g|| of a minibatch, {baseline.name}", ylabel="||g|| of the same minibatch",
        xscale="log", yscale="log",
    )  # fmt: skip
    axes.grid(True, color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write the files that were asked for; returns what ``--json`` holds."""
    losses = surrogates(args.algorithm)
    config = load_config(args.config, args.overrides)
    settings = common.sampling(args, config)
    found, without_gradient = measure(args, config, settings, losses)
    report = {
        "model": args.model,
        "data": str(args.data),
        "minibatches": len(found[0].norms),
        "without_gradient": without_gradient,
        "prompts": settings.prompts,
        "group": settings.group,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "algorithms": summarise(found),
        "norms": {entry.name: entry.norms for entry in found},
        "cosines": {entry.name: entry.cosines for entry in found},
        "versions": common.versions(),
    }
    if args.json is not None:
        write_whole(args.json, json.dumps(common.plain(report), indent=1) + "\n")
    if args.plot is not None:
        common.save_figure(args.plot, lambda figure: plot(found, figure), (5.6, 4.6))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 after one line on stderr."""
    return common.command("sg_rlhf.measure.minibatch_gradients", parse_arguments, run, table, argv)


if __name__ == "__main__":
    sys.exit(main())
