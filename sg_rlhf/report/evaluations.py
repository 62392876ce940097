"""The accuracy of a run's evaluations, with the prompts that it trained on kept apart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.report.runs import Row, Run, number

#: Upstream's default of data.prompt_split and eval.split, and the endings that have no splits.
SPLIT = "train"
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True)
class Evaluated:
    """The share of correct answers at one evaluation.

    Attributes:
        step: after this rollout; 0 is before training.
        half_width: of the 95 % interval over prompts; NaN where the run does not say.
        prompts: how many; NaN where the run does not say.
    """

    step: int
    accuracy: float
    half_width: float
    prompts: float


def set_names(run: Run) -> list[str]:
    """The sets of ``sg.eval_sets`` in their order; none where the run evaluates one data set."""
    return [name for name, _ in _sets(run)]


def training_sets(run: Run) -> set[str]:
    """The sets of ``sg.eval_sets`` that hold prompts of ``data.prompt_dataset``."""
    splits = [run.settings.get(key) or SPLIT for key in ("data.prompt_split", "eval.split")]
    trained = _files(run.settings.get("data.prompt_dataset"))
    if splits[0] != splits[1]:
        trained = {path for path in trained if path.suffix in FILES}
    return {name for name, dataset in _sets(run) if _files(dataset) & trained}


def held_out_sets(run: Run) -> list[str]:
    """The sets of ``sg.eval_sets`` that are not training data."""
    trained = training_sets(run)
    return [name for name in set_names(run) if name not in trained]


def held_out_accuracy(run: Run) -> list[Evaluated]:
    """Accuracy on prompts that the run is not trained on.

    With ``sg.eval_sets`` the plain mean over ``held_out_sets``, with the half width of independent
    sets, as ``eval_accuracy`` is the mean over all of them; else ``eval_accuracy``.
    """
    if set_names(run):
        return sets_accuracy(run, held_out_sets(run))
    return _finite(_evaluated(row, [""]) for row in run.evaluations)


def sets_accuracy(run: Run, names: list[str]) -> list[Evaluated]:
    """The plain mean of the named sets, at the evaluations that have all of them."""
    prefixes = [f"{name}_" for name in names]
    return _finite(_evaluated(row, prefixes) for row in run.evaluations) if names else []


def held_out_label(run: Run) -> str:
    """Which sets ``held_out_accuracy`` is about; empty where the run has no sets."""
    names = held_out_sets(run)
    return f"mean of {' and '.join(names)}" if len(names) > 1 else "".join(names)


def sources(evaluations: Iterable[Row]) -> list[str]:
    """The data sources (or held-out sets) that the evaluations name, 2ppl before 10ppl."""
    found = {
        match[1]
        for row in evaluations
        for key in row
        if (match := re.fullmatch(r"eval_(.+)_accuracy", key))
    }
    return sorted(
        found, key=lambda s: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", s)]
    )


def set_of(source: str, names: Iterable[str]) -> str | None:
    """The set that a source of ``eval_{source}_accuracy`` is, or is a part of."""
    found = [name for name in names if source == name or source.startswith(f"{name}_")]
    return max(found, key=len, default=None)


def _sets(run: Run) -> list[tuple[str, Any]]:
    sets = run.settings.get("sg.eval_sets") or []
    return [(str(s["name"]), s.get("dataset")) for s in sets if isinstance(s, dict) and "name" in s]


def _files(datasets: Any) -> set[Path]:
    """The parts of what upstream takes as a data set: paths or names, commas between them."""
    parts = str(datasets or "").split(",")
    return {Path(part.strip()).resolve() for part in parts if part.strip()}


def _evaluated(row: Row, prefixes: list[str]) -> Evaluated:
    def values(key: str) -> list[float]:
        return [number(row, f"eval_{prefix}{key}") for prefix in prefixes]

    return Evaluated(
        step=int(row["global_step"]),
        accuracy=math.fsum(values("accuracy")) / len(prefixes),
        half_width=math.hypot(*values("accuracy_ci95")) / len(prefixes),
        prompts=math.fsum(values("num_prompts")),
    )


def _finite(points: Iterable[Evaluated]) -> list[Evaluated]:
    return [point for point in points if math.isfinite(point.accuracy)]
