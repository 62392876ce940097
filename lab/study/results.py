"""The results of a study: a file per cell while it runs, one of all runs, figures over seeds."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from lab.study.plan import Cell, Study
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.statistics import spikes
from sg_rlhf.config import ConfigError
from sg_rlhf.data_io import strict_json
from sg_rlhf.run_dir import jsonl_log

#: All runs of a study in one file, as it is published.
RECORD = "results.jsonl.gz"
#: Of a row of `summarize`; absent where no pair of runs has it.
PEAK_RATIO = "grad_norm_peak_ratio"
#: Fewer seeds than this get no interval: that of two is six times as wide as they are apart.
MIN_SEEDS = 3
#: Curves of a cell's file over optimizer steps, and their names in the rows.
_STEP_CURVES = {"grad_norm": "actor_grad_norm", "entropy": "entropy_loss", "kl": "kl"}
#: Means over the optimizer steps, of those that the run's version logs.
_STEP_MEANS = ("weight_mean", "weight_std", "zeroed_pos", "zeroed_neg")


def collect(
    run_dir: Path,
    sharpness: dict[str, Any] | None,
    accuracy: dict[str, Any] | None,
    columns: Sequence[str] = (),
) -> dict[str, Any]:
    """The figures and curves of a finished run, with these columns of its metrics.jsonl.

    An accuracy that was measured on the last checkpoint stands for the run's own last evaluation,
    which has fewer responses to a prompt; the latter stays in the curve.

    Raises:
        ValueError: the run directory lacks what a finished run has, or what this version logs.
    """
    try:
        return _collect(run_dir, sharpness, accuracy, columns)
    except KeyError as error:
        raise ValueError(
            f"{run_dir}: a row without {error}, as of an older version; train it again"
        ) from None


def _collect(
    run_dir: Path,
    sharpness: dict[str, Any] | None,
    accuracy: dict[str, Any] | None,
    columns: Sequence[str],
) -> dict[str, Any]:
    metrics = jsonl_log.read(run_dir / jsonl_log.METRICS)
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    evaluations = jsonl_log.read(run_dir / jsonl_log.EVALUATIONS)
    if not metrics or not steps or not evaluations:
        raise ValueError(
            f"{run_dir}: no finished run ({len(metrics)} rollouts, {len(evaluations)} evaluations)"
        )
    norms = _numbers(steps, "actor_grad_norm")
    last = steps[-max(1, len(steps) // 10) :]
    figures: dict[str, Any] = {
        "rollouts": metrics[-1]["global_step"],
        "optimizer_steps": len(steps),
        **norm_figures(norms),
        "entropy_before": _numbers(steps, "entropy_loss")[0],
        "entropy_after": statistics.fmean(_numbers(last, "entropy_loss")),
        **{
            key: statistics.fmean(_numbers(steps, f"sg/{key}"))
            for key in _STEP_MEANS
            if f"sg/{key}" in steps[0]
        },
        "seconds_per_rollout": statistics.median(_numbers(metrics, "timing/step_total")),
    }
    first = evaluations[:1] if evaluations[0]["global_step"] == 0 else []
    for name, row in (*(("before", row) for row in first), ("after", evaluations[-1])):
        for key, value in accuracies(row).items():
            figures[f"{key}_{name}"] = value
    for name, found in accuracy["sets"].items() if accuracy else ():
        for source in found.keys() - {"correct"}:
            key = name if source == "all" else f"{name}_{source}"
            figures[f"{key}_after"] = found[source]["accuracy"]
    for name in ("before", "after"):
        if {f"train_{name}", f"held_out_{name}"} <= figures.keys():
            figures[f"gap_{name}"] = figures[f"train_{name}"] - figures[f"held_out_{name}"]
    if sharpness is not None:
        figures["sharpness"] = sharpness["results"][0]["sharpness"]
    curves = {
        "reward": _rounded(metrics, "rollout/reward_mean", 4),
        "response_length": _rounded(metrics, "rollout/response_length_mean", 1),
        **{name: _rounded(steps, key, 5) for name, key in _STEP_CURVES.items()},
        **{key: _rounded(metrics, key, 5) for key in columns},
        "accuracy": [{"rollout": r["global_step"], **accuracies(r)} for r in evaluations],
    }
    environment = json.loads((run_dir / "environment.json").read_text())
    return {
        "figures": figures,
        "curves": curves,
        "sharpness": sharpness,
        "accuracy": accuracy,
        "versions": environment["versions"],
        "date": environment["started"],
    }


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The values of a key that were finite: a step that was skipped has a gradient norm of null."""
    return [row[key] for row in rows if row[key] is not None]


def _rounded(rows: Sequence[dict[str, Any]], key: str, digits: int) -> list[float | None]:
    return [None if row[key] is None else round(row[key], digits) for row in rows]


def norm_figures(norms: list[float]) -> dict[str, float]:
    """Gradient norms of a run. ``grad_norm_peak`` does not change with the gradient's scale.

    It is left out where most steps have no gradient, as where no answer is right any more.
    """
    median = statistics.median(norms)
    return {
        "grad_norm_mean": statistics.fmean(norms),
        "grad_norm_std": statistics.pstdev(norms),
        "grad_norm_max": max(norms),
        **({"grad_norm_peak": max(norms) / median} if median else {}),
        "spikes": len(spikes(norms)),
    }


def accuracies(row: dict[str, Any]) -> dict[str, float]:
    """Accuracy by evaluation set of one row of ``eval/eval.jsonl``."""
    return {
        key.removesuffix("_accuracy").removeprefix("eval_"): value
        for key, value in row.items()
        if key.endswith("_accuracy") and isinstance(value, (int, float))
    }


def read_record(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of ``results.jsonl.gz``, by the cell's name; {} without the file.

    Raises:
        ConfigError: it is not gzip-compressed JSON lines, each with a ``cell``.
    """
    file = folder / RECORD
    if not file.is_file():
        return {}
    try:
        lines = gzip.decompress(file.read_bytes()).splitlines()
        return {run["cell"]: run for run in map(json.loads, lines)}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not the runs of a study ({error})") from None


def write_record(folder: Path, runs: Iterable[tuple[Cell, dict[str, Any]]]) -> None:
    """Write ``results.jsonl.gz``: one line per run. The same runs give the same bytes."""
    rows = ({"cell": cell.name, **run} for cell, run in runs)
    lines = [strict_json.dumps(row, separators=(",", ":")) for row in rows]
    write_whole(folder / RECORD, gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def read_cell(path: Path) -> dict[str, Any] | None:
    """A cell's file, or None where there is none or it was cut short."""
    try:
        cell: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return cell


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % t-interval of a mean; NaN for fewer than `MIN_SEEDS` values."""
    if len(values) < MIN_SEEDS:
        return math.nan
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * spread


def geometric_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the mean and interval of the logarithms, back on the values' scale."""
    logarithms = [math.log(value) for value in values]
    middle, half = statistics.fmean(logarithms), interval(logarithms)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def main_accuracy(rows: Iterable[dict[str, Any]]) -> str:
    """The figure that variants are compared by: of the set ``held_out``, else of all sets."""
    return "held_out_after" if any("held_out_after" in row for row in rows) else "eval_after"


def summarize(study: Study, cells: Iterable[tuple[Cell, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per regime and variant: each figure's mean over seeds, and its ``difference`` to the
    baseline.

    A difference is paired: the baseline of the same regime and seed is subtracted first. So is
    ``grad_norm_peak_ratio``, a geometric mean with the interval of its logarithm. It is a ratio,
    as one spike of one seed would be all of a mean of differences.
    """
    figures = {(c.regime, c.variant, c.seed): found["figures"] for c, found in cells}
    groups: dict[tuple[str, str], list[int]] = {}
    for cell in study.cells():
        if (cell.regime, cell.variant, cell.seed) in figures:
            groups.setdefault((cell.regime, cell.variant), []).append(cell.seed)
    rows = []
    for (regime, variant), seeds in groups.items():
        runs = [figures[regime, variant, seed] for seed in seeds]
        bases = [figures.get((regime, study.file.baseline, seed), {}) for seed in seeds]
        pairs = list(zip(runs, bases, strict=True)) if variant != study.file.baseline else []
        row: dict[str, Any] = {"regime": regime, "variant": variant, "seeds": seeds}
        for key in dict.fromkeys(key for run in runs for key in run):
            values = [run[key] for run in runs if run.get(key) is not None]
            differences = [
                run[key] - base[key]
                for run, base in pairs
                if run.get(key) is not None and base.get(key) is not None
            ]
            if values:
                row[key] = _mean(values)
            if differences:
                row[key]["difference"] = _mean(differences)
        peaks = [(run.get("grad_norm_peak"), base.get("grad_norm_peak")) for run, base in pairs]
        ratios = [peak / other for peak, other in peaks if peak and other]
        if ratios:
            mean, low, high = geometric_mean(ratios)
            row[PEAK_RATIO] = {
                "mean": mean, "ci95_low": low, "ci95_high": high, "values": ratios
            }  # fmt: skip
        rows.append(row)
    return rows


def _mean(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.fmean(values), "ci95": interval(values), "values": values}
