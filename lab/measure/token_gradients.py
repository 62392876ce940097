"""Compare per-token gradient norms of a small model with the paper's w (1 - p), Eq. 16.

For a sample of response tokens it computes exactly

    ||grad_theta log pi(y)||   over all parameters, one gradient per token
    ||e_y - pi||               at the logits, the step of the proof that has no unknown constants

and compares both with 1 - p, plain and times the token weight w. Theorems 3.5 and 3.6 of
arXiv 2511.00066 say that w (1 - p) bounds a token's part of the gradient up to factors of the
network at that token. The ratio ||grad|| / (1 - p) shows how much these factors vary.

With advantages A (a run's samples, or --reward) it also measures what Theorem 3.6 is about, the sum
G of w A grad log pi over the batch:

    ||G|| / sum w |A| ||grad||         1: no cancellation, as the upper bound assumes, Eq. 17
    ||G|| / (U sum w |A| (1 - p))      Eq. 17 with U, the largest ||grad|| / (1 - p) of the sample
    ||G|| / root of sum (w A ||grad||)^2   1: independent directions, as Eq. 18 assumes
    mean cosine of two tokens' A grad log pi

G is exact; sums and cosines are estimates from the sampled tokens.
docs/results.md explains how to read the numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab.measure import options
from lab.measure.batch_loss import UNIFORM, Surrogate
from lab.measure.checkpoint import (
    DTYPES,
    MeasureError,
    TokenRow,
    choose_device,
    load_model,
    load_tokenizer,
    passes,
    responses,
)
from lab.measure.fixed_batch import FixedBatch
from lab.measure.minibatch_gradients import gradients
from lab.measure.token_figures import EDGES, Columns, summarise, tables, together
from lab.measure.token_gradient_norms import logit_gradient_norms, token_gradients
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.common.argument_types import positive_int, progress_bar
from sg_rlhf.config import load_config, weighting_of

EXAMPLES = """\
examples:
  512 tokens of the shipped tiny model's own answers, which the reward gives advantages
    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 distinct=names
    python -m lab.measure.token_gradients --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/train.jsonl --reward domain:kk --tokens 512 --json out/tokens.json
  the rollouts of a run, with the weights of its recipe
    python -m lab.measure.token_gradients --model runs/a/checkpoints/final \\
        --data runs/a/samples.jsonl --config configs/kk/grpo_sg_tiny_cpu.yaml
  every checkpoint that a run kept, on one batch
    python -m lab.measure.token_gradients --model runs/a/checkpoints/deepspeed/*_hf \\
        --batch out/batch.json --json out/tokens.json
"""

#: Memory for the gradients of one chunk, in bytes.
CHUNK_BYTES = 256 * 2**20


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its long help."""
    parser = options.new_parser("lab.measure.token_gradients", __doc__, EXAMPLES)
    options.add_fixed_batch(parser)
    parser.add_argument(
        "--tokens", type=positive_int, default=512, metavar="N", help="sampled tokens [512]"
    )
    options.add_dtype(parser, "float64", "dtype of the arithmetic; float32 blurs 1 - p below 1e-6")
    return options.parse(parser, argv)


def stratified(probs: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indices [n], stratum [n], represents [n]) of a sample with equal shares of the strata.

    A stratum (see ``EDGES``) with fewer tokens gives all of them, and what is left goes to the
    others. At most len(probs) tokens; the same seed gives the same sample.
    """
    generator = torch.Generator().manual_seed(seed)
    stratum = torch.bucketize(probs.cpu().double(), torch.tensor(EDGES[1:-1], dtype=torch.float64))
    members = [(stratum == k).nonzero()[:, 0] for k in range(len(EDGES) - 1)]
    quotas = [0] * len(members)
    for _ in range(min(n, len(probs))):
        open_ones = [k for k, found in enumerate(members) if quotas[k] < len(found)]
        quotas[min(open_ones, key=lambda k: quotas[k])] += 1
    parts, weights = [], []
    for found, quota in zip(members, quotas, strict=True):
        parts.append(found[torch.randperm(len(found), generator=generator)[:quota]])
        weights += [len(found) / quota] * quota if quota else []
    chosen = torch.cat(parts)
    order = chosen.argsort()
    return chosen[order], stratum[chosen][order], torch.tensor(weights, dtype=torch.float64)[order]


def all_probs(model: PreTrainedModel, batch: FixedBatch, pass_tokens: int) -> Tensor:
    """p of every response token [tokens], rows one after another."""
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for indices in passes(batch.rows, pass_tokens):
            out = responses(model, [batch.rows[i] for i in indices], batch.temperature)
            probs, mask = out.log_probs_BT().exp(), out.mask_BT
            found |= {i: probs[place][mask[place]].cpu() for place, i in enumerate(indices)}
    all_of_them = torch.cat([found[i] for i in range(len(batch.rows))])
    if not bool(torch.isfinite(all_of_them).all()):
        raise MeasureError(f"{batch.source}: the model gives tokens a probability that is NaN")
    return all_of_them


def measure(
    args: argparse.Namespace, model: PreTrainedModel, batch: FixedBatch, weights: Weighting
) -> tuple[Columns, float]:
    """Columns of the sampled tokens, in the order of the batch; and the norm of the sum of their
    directions, each with the sign of its advantage, times the tokens that it represents."""
    probs = all_probs(model, batch, args.pass_tokens)
    chosen, strata, represents = stratified(probs, args.tokens, args.seed)
    lengths = torch.tensor([len(row.response) for row in batch.rows])
    ends = lengths.cumsum(0)
    owners = torch.bucketize(chosen, ends, right=True)
    rows = [batch.rows[index] for index in owners.tolist()]
    places = chosen - (ends - lengths)[owners]
    parts = []
    direction_D = torch.zeros((), dtype=torch.float64, device=model.device)
    with progress_bar("token gradients", "tokens", len(chosen)) as bar:
        for index in owners.unique().tolist():
            row, here = batch.rows[index], owners == index
            scale_N = represents[here] * np.sign(row.advantage or 0.0)
            figures, of_row_D = row_figures(
                model, row, places[here].to(model.device), batch.temperature, weights, scale_N
            )
            direction_D = direction_D + of_row_D
            parts.append(figures)
            bar.update(len(figures))
    p, rest, logit_norm, grad_norm, weight = torch.cat(parts).T.contiguous().numpy()
    pairs = zip(rows, places.tolist(), strict=True)
    column = {
        "row": owners.numpy(),
        "position": places.numpy(),
        "token_id": np.array([row.response[place] for row, place in pairs]),
        "p": p,
        "one_minus_p": rest,
        "logit_norm": logit_norm,
        "grad_norm": grad_norm,
        "weight": weight,
        "weighted": weight * grad_norm,
        "w_one_minus_p": weight * rest,
        "stratum": strata.numpy(),
        "represents": represents.numpy(),
        "advantage": np.array([row.advantage for row in rows], dtype=float),
    }
    return column, float(torch.linalg.vector_norm(direction_D))


def row_figures(
    model: PreTrainedModel,
    row: TokenRow,
    places_N: Tensor,
    temperature: float,
    weights: Weighting,
    scale_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """p, 1 - p, ||e_y - pi||, ||grad|| and w of the tokens at these places of a response, [N, 5].

    And the sum of scale grad / ||grad|| over them, [D].
    """
    params = list(model.parameters())
    out = responses(model, [row], temperature)
    # Of a large vocabulary, the logits of a response can be larger than the model.
    bytes_each = sum(t.numel() * t.element_size() for t in (*params, out.logits_BTV))
    chunk = max(1, min(64, CHUNK_BYTES // bytes_each))
    # A single row has no padding: its positions are those of the response.
    log_probs_N = out.log_probs_BT()[0, places_N]
    norms_N, direction_D = token_gradients(
        log_probs_N, params, scale_N.to(model.device), chunk=chunk
    )
    columns = (
        log_probs_N.detach().double().exp(),
        *logit_gradient_norms(out.logits_BTV[0, places_N], out.targets_BT[0, places_N]),
        norms_N,
        token_weights(log_probs_N[None], weights)[0].double(),
    )
    return torch.stack(columns, 1).detach().cpu(), direction_D


def batch_gradient_norm(
    model: PreTrainedModel, batch: FixedBatch, weights: Weighting, pass_tokens: int
) -> float:
    """||G||_2, G the sum over all tokens of w A grad log pi: the policy gradient at ratio 1."""
    without_clip = Surrogate(weights, eps_low=1.0, eps_high=math.inf, dual_clip=None)
    mean_D = gradients(model, batch, {"": without_clip}, pass_tokens)[""]
    return batch.tokens * float(torch.linalg.vector_norm(mean_D, dtype=torch.float64))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the content of ``--json``."""
    config = load_config(args.config, args.overrides)
    if config.sources:
        weights = options.recipe_weights(config, args.overrides) or UNIFORM
    else:
        weights = weighting_of(config)  # the published one: this command compares token weights
    if weights.reads:
        raise MeasureError(
            f"sg.weighting.type={weights.name}: expected a weight that is a function of p alone, "
            "such as grpo_sg, reverse or uniform"
        )
    batch = options.make_batch(args, config, graded=False)
    return {
        "models": options.each_model(args.model, lambda name: report_of(args, name, batch, weights))
    }


def report_of(
    args: argparse.Namespace, name: str, batch: FixedBatch, weights: Weighting
) -> dict[str, Any]:
    """The figures of one checkpoint."""
    tokenizer = load_tokenizer(name)
    batch.check_tokenizer(name, tokenizer)
    # Batched backward passes need an attention whose every step can be batched.
    model = load_model(name, DTYPES[args.dtype], choose_device(args.device), attention="eager")
    column, directions = measure(args, model, batch, weights)
    points = zip(*(values.tolist() for values in column.values()), strict=True)
    advantages = [row.advantage for row in batch.rows]
    total = None
    if None not in advantages and any(advantages):
        norm = batch_gradient_norm(model, batch, weights, args.pass_tokens)
        total = together(column, directions, norm)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": args.dtype,
        "weights": weights.describe(),
        "tokens": len(column["p"]),
        "batch": batch.describe(),
        "summary": summarise(column),
        "sum": total,
        "points": [
            {**point, "token": tokenizer.decode([point["token_id"]])}
            for point in (dict(zip(column, values, strict=True)) for values in points)
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    return options.command("lab.measure.token_gradients", parse_arguments, run, tables, argv)


if __name__ == "__main__":
    sys.exit(main())
