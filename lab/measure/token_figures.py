"""Statistics of `token_gradients`: the figures of its tokens, table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from lab.measure.options import columns

#: Strata of p: an equal share of the sampled tokens comes from each, as far as it has any.
EDGES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0)


#: A value for each sampled token: ``row``, ``position`` and ``token_id``; ``p``, ``one_minus_p``,
#: ``logit_norm``, ``grad_norm``; its token weight as ``weight``, w * grad_norm as ``weighted``,
#: ``w_one_minus_p``; ``advantage``, NaN without one; ``stratum``, and ``represents``, the tokens of
#: the batch that it stands for: the size of its stratum over the number sampled there.
Columns = Mapping[str, np.ndarray]


def summarise(column: Columns) -> dict[str, Any]:
    """Correlations, the exact bound at the logits, the spread of the network's factor, strata."""
    rest, norm, logit_norm = (column[key] for key in ("one_minus_p", "grad_norm", "logit_norm"))
    unsure, moving = column["p"] < 0.5, rest > 0
    at_logits = logit_norm[moving] / rest[moving]
    return {
        "spearman": {
            "grad_norm_vs_one_minus_p": _spearman(norm, rest),
            "grad_norm_vs_one_minus_p_where_p_below_0.5": _spearman(norm[unsure], rest[unsure]),
            "grad_norm_vs_logit_norm": _spearman(norm, logit_norm),
            "logit_norm_vs_one_minus_p": _spearman(logit_norm, rest),
            "weighted_vs_w_one_minus_p": _spearman(column["weighted"], column["w_one_minus_p"]),
        },
        "logit_norm_over_one_minus_p": {
            "min": float(at_logits.min()) if moving.any() else None,
            "max": float(at_logits.max()) if moving.any() else None,
        },
        "grad_norm_over_one_minus_p": _quantiles(norm[moving] / rest[moving]),
        "spread": {
            name: _spread(column[name], column["represents"])
            for name in ("one_minus_p", "w_one_minus_p", "grad_norm", "weighted")
        },
        "strata": _strata(column),
    }


def together(column: Columns, directions: float, norm: float) -> dict[str, float | None]:
    """What Eq. 17 and 18 say of the sum G of w A grad log pi over the batch.

    Args:
        column: of sampled tokens with advantages.
        directions: ||sum of represents sign(A) grad / ||grad|| || over the tokens.
        norm: ||G||.

    Returns:
        norm; its ratios to the sum of norms, to the bound of Eq. 17, and to what independent
        directions give; the mean cosine of two different tokens, by the tokens they represent.
    """
    kept = (column["advantage"] != 0) & (column["grad_norm"] > 0)
    represents, advantage, grad_norm, weight, rest = (
        column[name][kept]
        for name in ("represents", "advantage", "grad_norm", "weight", "one_minus_p")
    )
    factor = weight * np.abs(advantage)
    bound = (represents * factor * rest).sum() * (grad_norm / rest).max(initial=0.0)
    independent = np.sqrt((represents * (factor * grad_norm) ** 2).sum())
    pairs = represents.sum() ** 2 - (represents**2).sum()
    return {
        "norm": norm,
        "over_sum_of_norms": _ratio(norm, (represents * factor * grad_norm).sum()),
        "over_bound": _ratio(norm, bound),
        "over_independent": _ratio(norm, independent),
        "mean_cosine": _ratio(directions**2 - (represents**2).sum(), pairs),
    }


def _ratio(value: float, other: float) -> float | None:
    return float(value / other) if other > 0 else None


def _spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    if len(a) < 3 or len(np.unique(a)) < 2 or len(np.unique(b)) < 2:
        return None
    return float(spearmanr(a, b).statistic)


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    shares = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
    if len(values) == 0:
        return dict.fromkeys(shares)
    return {name: float(np.quantile(values, share)) for name, share in shares.items()}


def _median(values: np.ndarray) -> float:
    """The lower one of two in the middle, as torch's."""
    return float(np.quantile(values, 0.5, method="lower"))


def _spread(values: np.ndarray, represents: np.ndarray) -> float | None:
    """Estimate of std / mean over the batch; each point counts as the tokens it represents."""
    mean = np.average(values, weights=represents)
    std = np.sqrt(np.average((values - mean) ** 2, weights=represents))
    return float(std / mean) if mean > 0 else None


def _strata(column: Columns) -> list[dict[str, Any]]:
    """Each stratum of p: its tokens, and its share of the sum of all gradient norms."""
    rows = []
    represents = column["represents"]
    sums = {name: column[name] @ represents for name in ("grad_norm", "weighted")}
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
                "one_minus_p": _median(part["one_minus_p"]),
                "logit_norm": _median(part["logit_norm"]),
                "grad_norm": _quantiles(part["grad_norm"]),
                "weight": _median(part["weight"]),
                **{
                    f"share_of_{name}": float(part[name] @ part["represents"] / total)
                    for name, total in sums.items()
                    if total > 0
                },
            }
        )
    return rows


#: What is said below every table.
CAUTION = """
A high correlation says that sure tokens have small gradients and unsure ones larger
ones. It does not say that the bound is tight (its factor varies as above), or that a
smaller gradient generalises better."""


def tables(found: dict[str, Any]) -> str:
    """The printed tables of every checkpoint."""
    return "\n\n".join(map(_table, found["models"]))


def _table(report: dict[str, Any]) -> str:
    """The printed tables."""
    summary = report["summary"]
    strata: list[list[Any]] = [
        ["p", "tokens", "sampled", "1 - p", "||e_y-pi||", "||grad||", "5 %", "95 %", "w", "share",
         "share, w"]
    ]  # fmt: skip
    for r in summary["strata"]:
        q = r["grad_norm"]
        strata.append(
            ["{:g} to {:g}".format(*r["p"]), r["tokens"], r["sampled"], r["one_minus_p"],
             r["logit_norm"], q["median"], q["q05"], q["q95"], r["weight"],
             r.get("share_of_grad_norm"), r.get("share_of_weighted")]
        )  # fmt: skip
    lines = [
        f"batch: {report['batch']['about']}",
        f"model: {report['model']}, {report['parameters']:,} parameters, {report['dtype']}",
        f"weights: {report['weights']}",
        f"tokens: {report['tokens']} sampled of {report['batch']['tokens']}, in equal shares of p",
        "",
        *columns(strata),
        "medians within each stratum; share: of the sum of ||grad|| (and w ||grad||) of the batch",
    ]
    for title, found in (
        ("Spearman's rank correlation over the sampled tokens", summary["spearman"]),
        (
            "||e_y - pi|| / (1 - p), in the proof 1 to 1.4142",
            summary["logit_norm_over_one_minus_p"],
        ),
        (
            "||grad|| / (1 - p), the factor of the network in the bound",
            summary["grad_norm_over_one_minus_p"],
        ),
        ("std / mean over the batch", summary["spread"]),
        ("sum over the batch of w A grad log pi; Eq. 18 assumes independence", report["sum"]),
    ):
        if found is None:
            lines += ["", "Eq. 17 and 18 need advantages: a run's samples, or --reward"]
        else:
            named = [[f"  {name.replace('_', ' ')}", value] for name, value in found.items()]
            lines += ["", title, *columns(named)]
    return "\n".join([*lines, CAUTION])
