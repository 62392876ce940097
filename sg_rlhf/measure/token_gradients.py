"""Compare per-token gradient norms of a small model with the paper's w (1 - p), Eq. 16.

For a sample of response tokens it computes exactly

    ||grad_theta log pi(y)||   over all parameters, one gradient per token
    ||e_y - pi||               at the logits, the step of the proof that has no unknown constants

and compares both with 1 - p, plain and times the token weight w. Theorems 3.5 and 3.6 of
arXiv 2511.00066 say that w (1 - p) bounds a token's part of the gradient up to factors of the
network at that token. The ratio ||grad|| / (1 - p) shows how much these factors vary.
docs/results.md explains how to read the numbers.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sg_rlhf.algo.analysis.token_gradient_norms import logit_gradient_norms, token_gradient_norms
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.common.argument_types import positive_int, progress_bar
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.config import load_config, weighting_of
from sg_rlhf.data_io import strict_json
from sg_rlhf.measure import options
from sg_rlhf.measure.batch_loss import UNIFORM
from sg_rlhf.measure.checkpoint import (
    DTYPES,
    MeasureError,
    choose_device,
    load_model,
    load_tokenizer,
    passes,
    responses,
)
from sg_rlhf.measure.fixed_batch import FixedBatch

EXAMPLES = """\
examples:
  512 tokens of the shipped tiny model's own answers
    python -m sg_rlhf.data kk --out data/kk_tiny --generate people=2-3 per_size=160 distinct=names
    python -m sg_rlhf.measure.token_gradients --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/train.jsonl --tokens 512 --csv out/tokens.csv --plot out/tokens.png
  the rollouts of a run, with the weights of its recipe
    python -m sg_rlhf.measure.token_gradients --model runs/a/checkpoints/final \\
        --data runs/a/samples.jsonl --config configs/kk/grpo_sg_tiny_cpu.yaml
  another weighting
    python -m sg_rlhf.measure.token_gradients --model CKPT --batch out/batch.json \\
        sg.weighting.lower=0.5
"""

#: Strata of p: an equal share of the sampled tokens comes from each, as far as it has any.
EDGES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0)
#: Memory for the gradients of one chunk, in bytes.
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Point:
    """One sampled token.

    represents: tokens of the batch that it stands for, the size of its stratum over the number
    sampled there. w: its token weight. weighted: w * grad_norm. w_one_minus_p: w * (1 - p).
    """

    row: int
    position: int
    token_id: int
    token: str
    p: float
    one_minus_p: float
    logit_norm: float
    grad_norm: float
    weight: float
    weighted: float
    w_one_minus_p: float
    stratum: int
    represents: float


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its long help."""
    parser = options.new_parser("sg_rlhf.measure.token_gradients", __doc__, EXAMPLES)
    parser.add_argument("--model", required=True, metavar="CKPT", help="folder, id or module:NAME")
    parser.add_argument(
        "--tokens", type=positive_int, default=512, metavar="N", help="sampled tokens [512]"
    )
    parser.add_argument(
        "--chunk", type=positive_int, metavar="N", help="backward passes at a time [by memory]"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one line for each token")
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
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: FixedBatch,
    weights: Weighting,
) -> list[Point]:
    """One point for each sampled token, in the order of the batch."""
    probs = all_probs(model, batch, args.pass_tokens)
    chosen, strata, represents = stratified(probs, args.tokens, args.seed)
    params = list(model.parameters())
    bytes_each = sum(p.numel() * p.element_size() for p in params)
    chunk = args.chunk or max(1, min(64, CHUNK_BYTES // bytes_each))
    starts = torch.tensor([0, *(len(row.response) for row in batch.rows)]).cumsum(0)
    points: list[Point] = []
    with progress_bar("token gradients", "tokens", len(chosen)) as bar:
        for index, row in enumerate(batch.rows):
            here = ((chosen >= starts[index]) & (chosen < starts[index + 1])).nonzero()[:, 0]
            if len(here) == 0:
                continue
            places_N = (chosen[here] - starts[index]).to(model.device)
            out = responses(model, [row], batch.temperature)
            # A single row has no padding: its positions are those of the response.
            logits_NV, targets_N = out.logits_BTV[0, places_N], out.targets_BT[0, places_N]
            log_probs_N = out.log_probs_BT()[0, places_N]
            one_minus_p_N, logit_norm_N = logit_gradient_norms(logits_NV, targets_N)
            grad_norm_N = token_gradient_norms(log_probs_N, params, chunk=chunk)
            weight_N = token_weights(log_probs_N[None], weights)[0].double()
            columns = zip(
                places_N.tolist(),
                targets_N.tolist(),
                log_probs_N.detach().double().exp().tolist(),
                one_minus_p_N.tolist(),
                logit_norm_N.tolist(),
                grad_norm_N.tolist(),
                weight_N.tolist(),
                strata[here].tolist(),
                represents[here].tolist(),
                strict=True,
            )
            for place, token, p, rest, logit, grad, weight, stratum, stands in columns:
                points.append(
                    Point(
                        index, place, token, tokenizer.decode([token]), p, rest, logit, grad,
                        weight, weight * grad, weight * rest, stratum, stands,
                    )
                )  # fmt: skip
            bar.update(len(here))
    return points


def summarise(points: Sequence[Point]) -> dict[str, Any]:
    """Correlations, the exact bound at the logits, the spread of the network's factor, strata."""
    column = {
        field.name: torch.tensor([getattr(p, field.name) for p in points], dtype=torch.float64)
        for field in fields(Point)
        if field.name != "token"
    }
    moving = column["one_minus_p"] > 0
    unsure = column["p"] < 0.5
    at_logits = (column["logit_norm"] / column["one_minus_p"])[moving]
    factor = (column["grad_norm"] / column["one_minus_p"])[moving]
    return {
        "spearman": {
            "grad_norm_vs_one_minus_p": _spearman(column, "grad_norm", "one_minus_p"),
            "grad_norm_vs_one_minus_p_where_p_below_0.5": _spearman(
                column, "grad_norm", "one_minus_p", unsure
            ),
            "grad_norm_vs_logit_norm": _spearman(column, "grad_norm", "logit_norm"),
            "logit_norm_vs_one_minus_p": _spearman(column, "logit_norm", "one_minus_p"),
            "weighted_vs_w_one_minus_p": _spearman(column, "weighted", "w_one_minus_p"),
        },
        "logit_norm_over_one_minus_p": _range(at_logits),
        "grad_norm_over_one_minus_p": _quantiles(factor),
        "spread": {
            name: _spread(column[name], column["represents"])
            for name in ("one_minus_p", "w_one_minus_p", "grad_norm", "weighted")
        },
        "strata": _strata(column),
    }


def _spearman(
    column: dict[str, Tensor], x: str, y: str, where: Tensor | None = None
) -> float | None:
    a, b = column[x], column[y]
    if where is not None:
        a, b = a[where], b[where]
    if len(a) < 3 or a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def _range(values: Tensor) -> dict[str, float | None]:
    if len(values) == 0:
        return {"min": None, "max": None}
    return {"min": float(values.min()), "max": float(values.max())}


def _quantiles(values: Tensor) -> dict[str, float | None]:
    shares = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
    if len(values) == 0:
        return dict.fromkeys(shares)
    return {name: float(values.quantile(share)) for name, share in shares.items()}


def _spread(values: Tensor, represents: Tensor) -> float | None:
    """Estimate of std / mean over the batch; each point counts as the tokens it represents."""
    total = represents.sum()
    mean = (values * represents).sum() / total
    std = (((values - mean) ** 2 * represents).sum() / total).sqrt()
    return float(std / mean) if mean > 0 else None


def _strata(column: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Each stratum of p: its tokens, and its share of the sum of all gradient norms."""
    rows = []
    sums = {name: (column[name] * column["represents"]).sum() for name in ("grad_norm", "weighted")}
    for k in range(len(EDGES) - 1):
        here = column["stratum"] == k
        if not here.any():
            continue
        part = {name: values[here] for name, values in column.items()}
        rows.append(
            {
                "p": [EDGES[k], EDGES[k + 1]],
                "sampled": int(here.sum()),
                "tokens": round(float(part["represents"].sum())),
                "one_minus_p": float(part["one_minus_p"].median()),
                "logit_norm": float(part["logit_norm"].median()),
                "grad_norm": _quantiles(part["grad_norm"]),
                "weight": float(part["weight"].median()),
                **{
                    f"share_of_{name}": float((part[name] * part["represents"]).sum() / total)
                    for name, total in sums.items()
                    if total > 0
                },
            }
        )
    return rows


def table(report: dict[str, Any]) -> str:
    """The printed tables."""
    summary, rho = report["summary"], report["summary"]["spearman"]
    at_logits, factor = (
        summary["logit_norm_over_one_minus_p"],
        summary["grad_norm_over_one_minus_p"],
    )
    lines = [
        f"batch: {report['batch_line']}",
        f"model: {report['model']}, {report['parameters']:,} parameters, {report['dtype']}",
        f"weights: {report['weights']}",
        f"tokens: {report['tokens']} sampled of {report['batch']['tokens']}, in equal shares of p",
        "",
        "           p   tokens  sampled    1 - p  ||e_y-pi||  ||grad||    5 % ..  95 %       w"
        "   share  share, w",
    ]
    for r in summary["strata"]:
        q = r["grad_norm"]
        lines.append(
            f"{r['p'][0]:5.3g}..{r['p'][1]:5.3g} {r['tokens']:8d} {r['sampled']:8d} "
            f"{r['one_minus_p']:8.2g}  {r['logit_norm']:10.3g}  {q['median']:8.3g} "
            f"{q['q05']:8.3g} {q['q95']:7.3g} {r['weight']:7.3f} "
            f"{_number(r.get('share_of_grad_norm'), '7.1%')} "
            f"{_number(r.get('share_of_weighted'), '9.1%')}"
        )
    spread = summary["spread"]
    lines += [
        "medians within each stratum; share: of the sum of ||grad|| (and w ||grad||) of the batch",
        "",
        "Spearman's rank correlation over the sampled tokens",
        f"  ||grad|| and 1 - p          {_number(rho['grad_norm_vs_one_minus_p'])}",
        "  ||grad|| and 1 - p, p < 0.5 "
        f"{_number(rho['grad_norm_vs_one_minus_p_where_p_below_0.5'])}",
        f"  ||grad|| and ||e_y - pi||   {_number(rho['grad_norm_vs_logit_norm'])}",
        f"  ||e_y - pi|| and 1 - p      {_number(rho['logit_norm_vs_one_minus_p'])}",
        f"  w ||grad|| and w (1 - p)    {_number(rho['weighted_vs_w_one_minus_p'])}",
        f"||e_y - pi|| / (1 - p): {_number(at_logits['min'], '.4f')} to "
        f"{_number(at_logits['max'], '.4f')} (the proof: 1 to 1.4142)",
        f"||grad|| / (1 - p): median {_number(factor['median'], '.3g')}, 5 % "
        f"{_number(factor['q05'], '.3g')}, 95 % {_number(factor['q95'], '.3g')}: the factor of "
        "the network in the bound",
        "std / mean over the batch: "
        + ", ".join(
            f"{name} {_number(spread[key], '.3f')}"
            for name, key in (
                ("1 - p", "one_minus_p"),
                ("w (1 - p)", "w_one_minus_p"),
                ("||grad||", "grad_norm"),
                ("w ||grad||", "weighted"),
            )
        ),
        "",
        "A high correlation says that sure tokens have small gradients and unsure ones larger",
        "ones. It does not say that the bound is tight (its factor varies as above), that the",
        "batch's gradient, in which tokens add up or cancel, follows the sum of norms, or that a",
        "smaller gradient generalises better.",
    ]
    return "\n".join(lines)


def _number(value: float | None, form: str = "6.3f") -> str:
    return "-" if value is None else format(value, form)


def plot(report: dict[str, Any], points: Sequence[Point], figure: Any) -> None:
    """Both norms over 1 - p, the exact bound shaded; the weighted norm over w (1 - p)."""
    left, right = figure.subplots(1, 2, sharey=True)
    moving = [p for p in points if p.one_minus_p > 0 and p.grad_norm > 0]
    x = [p.one_minus_p for p in moving]
    left.scatter(x, [p.grad_norm for p in moving], s=8, color="tab:blue", label="all parameters")
    left.scatter(x, [p.logit_norm for p in moving], s=8, color="tab:orange", label="at the logits")
    ends = [min(x, default=1e-6), 1.0]
    left.fill_between(
        ends, ends, [2**0.5 * e for e in ends], color="0.5", alpha=0.35, lw=0,
        label=r"$1-p$ to $\sqrt{2}\,(1-p)$",
    )  # fmt: skip
    left.set(xlabel="1 - p", ylabel=r"norm of the gradient of $\log\,\pi(y)$")
    right.scatter(
        [p.w_one_minus_p for p in moving],
        [p.weighted for p in moving],
        s=8,
        color="tab:green",
        label="w times all parameters",
    )
    right.set(xlabel="w (1 - p)")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(True, color="0.9", lw=0.8)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{report['model'][-60:]}, {report['tokens']} tokens", fontsize=10)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the requested files, and return the content of ``--json``."""
    config = load_config(args.config, args.overrides)
    # Without a recipe: the published weighting, since this command compares token weights.
    weights = options.checked_curve(
        (options.recipe_weights(config, args.overrides) if config.sources else weighting_of(config))
        or UNIFORM
    )
    batch = options.make_batch(args, config, [args.model], graded=False)
    tokenizer = load_tokenizer(args.model)
    batch.check_tokenizer(args.model, tokenizer)
    # Batched backward passes need an attention whose every step can be batched.
    model = load_model(
        args.model, DTYPES[args.dtype], choose_device(args.device), attention="eager"
    )
    points = measure(args, model, tokenizer, batch, weights)
    report = {
        "model": args.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": args.dtype,
        "weights": weights.describe(),
        "tokens": len(points),
        "batch": options.batch_facts(batch),
        "batch_line": batch.describe(),
        "summary": summarise(points),
        **options.origin(args),
    }
    if args.csv is not None:
        write_whole(args.csv, _csv(points))
    if args.json is not None:
        full = {**report, "points": [asdict(point) for point in points]}
        write_whole(args.json, strict_json.dumps(full) + "\n")
    if args.plot is not None:
        options.save_figure(args.plot, lambda figure: plot(report, points, figure), (9.0, 4.4))
    return report


def _csv(points: Sequence[Point]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Point)])
    writer.writerows(asdict(point).values() for point in points)
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    return options.command("sg_rlhf.measure.token_gradients", parse_arguments, run, table, argv)


if __name__ == "__main__":
    sys.exit(main())
