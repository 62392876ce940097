"""Measure the sharpness of checkpoints (Eq. 14): how far the loss rises within a ball.

    S(rho) = max over ||e|| <= rho of L(theta + e) - L(theta)

Projected gradient ascent finds a lower bound of it (lab.measure.ascent). The table
also has the first-order surrogate rho * ||grad L(theta)|| of Eq. 15. All checkpoints of one call
are measured on the same fixed batch.

L is the mean negative log-likelihood of the responses (--loss nll), or minus the clipped surrogate
of GRPO at ratio 1 (--loss grpo, the default) with uniform weights, so that checkpoints of different
algorithms are measured with one loss; a recipe or sg. keys put its token weights into L.
docs/results.md explains how to read the numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lab.measure import options
from lab.measure.ascent import parameter_norm, sharpness
from lab.measure.batch_loss import UNIFORM, BatchLoss, Surrogate
from lab.measure.checkpoint import (
    DTYPES,
    MeasureError,
    choose_device,
    load_model,
    load_tokenizer,
)
from lab.measure.fixed_batch import FixedBatch
from sg_rlhf.common.argument_types import positive_float, positive_int, progress_bar
from sg_rlhf.config import Config, load_config
from sg_rlhf.config.upstream_flags import PROMPT_MEAN
from sg_rlhf.weights.describe import clip_range

EXAMPLES = """\
examples:
  the shipped tiny model on puzzles that it answers itself
    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 distinct=names
    python -m lab.measure.sharpness --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/train.jsonl --reward domain:kk --rho 0.01 0.05 0.2
  two checkpoints on one batch, which is kept
    python -m lab.measure.sharpness --model runs/a/checkpoints/final runs/b/checkpoints/final \\
        --data data/kk/train.jsonl --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --batch out/batch.json --rho 0.05 --json out/sharpness.json
  the rollouts that a run kept; the likelihood instead of the surrogate
    python -m lab.measure.sharpness --model runs/a/checkpoints/final \\
        --data runs/a/samples.jsonl --loss nll --rho 0.05
  radii relative to ||theta||, with the weights of GRPO-SG in the loss
    python -m lab.measure.sharpness --model CKPT --batch out/batch.json --relative \\
        --rho 1e-4 1e-3 sg.weighting.upper=1.2
"""

#: Below this share of |L| a rise is rounding, not a measurement. float64 is no better than this
#: because transformers' normalisation and rotary code rounds to float32 on the way.
RESOLUTION = {"float32": 1e-6, "float64": 1e-9}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its long help."""
    parser = options.new_parser("lab.measure.sharpness", __doc__, EXAMPLES)
    options.add_fixed_batch(parser)
    parser.add_argument(
        "--rho", nargs="+", type=positive_float, required=True, metavar="R", help="radii"
    )
    parser.add_argument(
        "--relative", action="store_true", help="radii are shares of each model's ||theta||"
    )
    parser.add_argument("--loss", choices=("grpo", "nll"), default="grpo", help="L [grpo]")
    parser.add_argument(
        "--steps", type=positive_int, default=8, metavar="K", help="steps of the ascent [8]"
    )
    options.add_dtype(parser, "float32", "dtype of parameters and arithmetic")
    return options.parse(parser, argv)


def surrogate_of(config: Config, overrides: Sequence[str]) -> Surrogate:
    """The recipe's own objective; the paper's clip and uniform weights without one."""
    if not config.sources and not overrides:
        return Surrogate()
    mean = config.value("actor.loss_agg_mode")
    if mean == PROMPT_MEAN:
        raise MeasureError(
            f"actor.loss_agg_mode={mean}: expected token-mean or seq-mean-token-mean, the means "
            "that this command measures"
        )
    low, high = clip_range(config)
    dual_clip = config.values.get("actor.dual_clip")
    if dual_clip is None and not config.sources:
        dual_clip = Surrogate.dual_clip
    return Surrogate(
        weights=options.recipe_weights(config, overrides) or UNIFORM,
        eps_low=low,
        eps_high=high,
        dual_clip=dual_clip,
        token_level=mean == "token-mean",
    )


def measure(
    args: argparse.Namespace, batch: FixedBatch, surrogate: Surrogate | None
) -> list[dict[str, Any]]:
    """One entry for each checkpoint: its centre, and what was found at each radius."""
    device = choose_device(args.device)
    if device.type == "cuda":
        # Reproducible on the same GPU; an operation that has no such kernel is named by torch.
        torch.use_deterministic_algorithms(True, warn_only=True)
    for name in args.model:
        batch.check_tokenizer(name, load_tokenizer(name))
    total = len(args.model) * len(args.rho) * (args.steps + 1)
    with progress_bar("sharpness", "evaluations", total) as bar:

        def entry(name: str) -> dict[str, Any]:
            bar.set_postfix_str(name[-40:])
            model = load_model(name, DTYPES[args.dtype], device)
            params = list(model.parameters())
            norm = parameter_norm(params)
            loss = BatchLoss(model, batch, surrogate, pass_tokens=args.pass_tokens)
            radii = [rho * norm if args.relative else rho for rho in args.rho]
            results = [
                sharpness(params, loss, radius, steps=args.steps, on_step=bar.update)
                for radius in radii
            ]
            return {
                "model": name,
                "parameters": sum(p.numel() for p in params),
                "parameter_norm": norm,
                "loss": results[0].loss,
                "grad_norm": results[0].grad_norm,
                "results": [
                    {
                        "rho_given": rho,
                        "rho": result.rho,
                        "sharpness": result.value,
                        "first_order": result.first_order,
                        "best_step": result.best_step,
                        "steps": [asdict(step) for step in result.steps],
                    }
                    for rho, result in zip(args.rho, results, strict=True)
                ],
            }

        return options.each_model(args.model, entry)


def table(report: dict[str, Any]) -> str:
    """The printed table."""
    lines = [f"batch: {report['batch']['about']}", f"loss: {report['loss']}, {report['dtype']}"]
    notes = []
    for entry in report["models"]:
        lines += [
            "",
            f"{entry['model']}: L = {entry['loss']:.6g}, ||grad L|| = {entry['grad_norm']:.4g}, "
            f"||theta|| = {entry['parameter_norm']:.4g}, {entry['parameters']:,} parameters",
        ]
        cells: list[list[Any]] = [["rho", "sharpness", "first order", "ratio", "best step"]]
        for r in entry["results"]:
            ratio = r["sharpness"] / r["first_order"] if r["first_order"] else None
            best = f"{r['best_step']}/{len(r['steps'])}"
            cells.append([f"{r['rho']:.4g}", r["sharpness"], r["first_order"], ratio, best])
            notes += _notes(entry, r, report)
        lines += options.columns(cells)
    lines += [
        "",
        "sharpness: largest rise of L found within the ball (Eq. 14), a lower bound of the maximum",
        "first order: rho * ||grad L|| (Eq. 15); ratio: the first divided by the second",
        *dict.fromkeys(notes),
    ]
    return "\n".join(lines)


def _notes(entry: dict[str, Any], r: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Notes on the limits of a row, such as a rise within rounding."""
    notes = []
    if r["sharpness"] < 100 * RESOLUTION[report["dtype"]] * abs(entry["loss"]):
        more = ": --dtype float64" if report["dtype"] == "float32" else ""
        notes.append(f"note: a rise near the rounding of {report['dtype']}{more}, or a larger rho")
    if len(r["steps"]) > 1 and r["best_step"] == len(r["steps"]):
        notes.append("note: a last step was the best one; more --steps may find more")
    if not all(math.isfinite(step["rise"]) for step in r["steps"]):
        notes.append(f"note: the loss was not finite at rho {r['rho']:g}; the ascent stopped there")
    return notes


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the content of ``--json``."""
    config = load_config(args.config, args.overrides)
    graded = args.loss == "grpo"
    surrogate = surrogate_of(config, args.overrides) if graded else None
    batch = options.make_batch(args, config, graded=graded)
    return {
        "loss": surrogate.describe() if surrogate else "nll: mean over tokens",
        "dtype": args.dtype,
        "steps": args.steps,
        "relative": args.relative,
        "batch": batch.describe(),
        "models": measure(args, batch, surrogate),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    return options.command("lab.measure.sharpness", parse_arguments, run, table, argv)


if __name__ == "__main__":
    sys.exit(main())
