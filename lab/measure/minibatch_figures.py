"""Statistics of `minibatch_gradients`: figures with intervals, table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from lab.measure.adamw import AdamW
from lab.measure.options import columns

#: Resamples of the minibatches for an interval, and the fewest minibatches that get one.
RESAMPLES, LEAST = 2000, 8


class Vector(NamedTuple):
    """A gradient or an update: its norm, and its cosine with the baseline's."""

    norm: float
    cosine: float


#: Algorithm -> its gradients over the minibatches, then its updates if there was a warm-up.
Measured = Mapping[str, Sequence[Sequence[Vector]]]


def spread(norms: np.ndarray, axis: int = -1) -> Any:
    """std / mean."""
    return norms.std(axis=axis, ddof=1) / norms.mean(axis=axis)


def _relative_spread(norms: np.ndarray, baseline: np.ndarray, axis: int = -1) -> Any:
    return spread(norms, axis) / spread(baseline, axis)


def summarise(found: Measured, optimizer: AdamW | None = None) -> list[dict[str, Any]]:
    """A row per algorithm, of its gradient; ``update`` has the same figures of its update.

    Intervals are 95 % percentile bootstraps over minibatches, paired. clipped: the share of the
    minibatches whose gradient the norm clip shortens.
    """
    rows = []
    baseline = next(iter(found.values()))
    for name, (gradients, *updates) in found.items():
        row = {"algorithm": name, **_figures(gradients, baseline[0])}
        if optimizer is not None:
            row["clipped"] = float(np.mean([optimizer.clips(g.norm) for g in gradients]))
            row["update"] = _figures(updates[0], baseline[1])
        rows.append(row)
    return rows


def _figures(vectors: Sequence[Vector], baseline: Sequence[Vector]) -> dict[str, Any]:
    norms, cosines = (np.array(column) for column in zip(*vectors, strict=True))
    others = np.array([vector.norm for vector in baseline])
    ratio = norms / others
    figures: dict[str, Any] = {
        "norm_mean": float(norms.mean()),
        "size": float(ratio.mean()),
        "size_range": [float(ratio.min()), float(ratio.max())],
        "cosine": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
        "spread": float(spread(norms)),
        "peak": float(norms.max() / np.median(norms)),
    }
    if vectors is not baseline:
        figures["spread_over_baseline"] = float(_relative_spread(norms, others))
        if len(norms) >= LEAST:
            interval = stats.bootstrap(
                (norms, others), _relative_spread, paired=True, vectorized=True,
                method="percentile", n_resamples=RESAMPLES, rng=np.random.default_rng(0),
            ).confidence_interval  # fmt: skip
            figures["spread_over_baseline_ci95"] = [float(interval.low), float(interval.high)]
    return figures


def tables(found: dict[str, Any]) -> str:
    """The printed tables of every checkpoint."""
    return "\n\n".join(map(_table, found["models"]))


def _table(report: dict[str, Any]) -> str:
    """The printed table."""
    rows = report["algorithms"]
    without = report["without_gradient"]
    lines = [
        f"{report['minibatches']} minibatches of {report['prompts']} prompts x {report['group']}, "
        f"temperature {report['temperature']:g}, {report['model']}"
        + (f"; {without} more had no gradient" if without else ""),
        "",
        *_block("gradient", "||g||", rows, rows),
    ]
    optimizer = report["optimizer"]
    if optimizer:
        betas = ", ".join(f"{beta:g}" for beta in optimizer["betas"])
        lines += [
            "",
            *_block("update", "||u||", rows, [row["update"] for row in rows]),
            "",
            f"update: AdamW's step over the learning rate after {optimizer['warm_up']} other "
            "minibatches,",
            f"betas {betas}, eps {optimizer['eps']:g}, max_norm {optimizer['max_norm']}. Gradients "
            "shortened by max_norm:",
            ", ".join(f"{row['algorithm']} {row['clipped']:.0%}" for row in rows),
        ]
    return "\n".join(
        [
            *lines,
            "",
            f"size: norm over {rows[0]['algorithm']}'s on the same minibatch. spread: std / mean",
            "of it over minibatches; relative: divided by the baseline's, with a 95 % bootstrap",
            "interval. peak: largest norm over the median one.",
        ]
    )


def _block(
    title: str, norm: str, rows: Sequence[dict[str, Any]], figures: Sequence[dict[str, Any]]
) -> list[str]:
    cells: list[list[Any]] = [
        [title, f"mean {norm}", "size", "least", "most", "cosine", "least", "spread", "relative",
         "low", "high", "peak"]
    ]  # fmt: skip
    for row, found in zip(rows, figures, strict=True):
        cells.append(
            [row["algorithm"], found["norm_mean"], found["size"], *found["size_range"],
             found["cosine"], found["cosine_min"], found["spread"],
             found.get("spread_over_baseline"),
             *found.get("spread_over_baseline_ci95", (None, None)), found["peak"]]
        )  # fmt: skip
    return columns(cells)
