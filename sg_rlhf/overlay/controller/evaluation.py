"""In-training evaluation that reports accuracy, from ``correct`` in the reward's ``extra_logs``.

Upstream's ``eval_*_pass1`` is the mean reward and ``pass{n}`` the largest reward. Here both are
shares of correct answers, and the mean reward has its own name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping

from openrlhf.trainer.ppo_utils.experience import Experience
from torchdata.stateful_dataloader import StatefulDataLoader

from sg_rlhf.common.statistics import half_width
from sg_rlhf.config import EvalSet
from sg_rlhf.overlay.rollout.samples import Sampling

#: Metrics that are logged for each of several sets, with ``pass{n}``.
SUMMARIES = (
    "accuracy", "accuracy_ci95", "num_prompts", "reward_mean", "response_length_mean",
    "truncated_rate", "format_ok",
)  # fmt: skip


def compute_eval_metrics(
    eval_dataloader: StatefulDataLoader, samples_list: list[Experience], n_samples_per_prompt: int
) -> dict[str, float]:
    """Metrics of each data source, ``eval_{source}_NAME``, and of all prompts, ``eval_NAME``:

    - ``accuracy``, also as ``pass1``: mean over prompts of the share of correct responses;
    - ``accuracy_ci95``: half width of its normal 95 % interval over prompts;
    - ``pass{n}``: share of prompts with a correct response among n;
    - ``reward_mean``, ``response_length_mean``, ``truncated_rate``, ``format_ok``: means over
      responses;
    - ``num_prompts``.

    No accuracy without ``correct``; {} without samples.
    """
    if not samples_list:
        return {}
    source_of = {
        prompt: source
        for sources, prompts, _, _ in eval_dataloader
        for prompt, source in zip(prompts, sources, strict=True)
    }
    groups: dict[str, list[list[Experience]]] = defaultdict(list)
    for start in range(0, len(samples_list), n_samples_per_prompt):
        group = samples_list[start : start + n_samples_per_prompt]
        groups[source_of.get(group[0].prompts[0], "unknown")].append(group)
    logs: dict[str, float] = {}
    for source, source_groups in sorted(groups.items()):
        for name, value in _summary(source_groups, n_samples_per_prompt).items():
            logs[f"eval_{source}_{name}"] = value
    everything = [group for source_groups in groups.values() for group in source_groups]
    for name, value in _summary(everything, n_samples_per_prompt).items():
        logs[f"eval_{name}"] = value
    logs["eval_num_samples"] = float(len(samples_list))
    return logs


def sampling_of(eval_set: EvalSet, rollouts: Sampling) -> Sampling:
    """The set's settings; what it does not set is that of the rollouts."""
    return dataclasses.replace(
        rollouts,
        n_samples_per_prompt=eval_set.n_samples_per_prompt,
        temperature=eval_set.temperature,
        top_p=eval_set.top_p,
        max_new_tokens=eval_set.max_new_tokens or rollouts.max_new_tokens,
    )


def combine(by_set: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several sets as one row: ``eval_X`` of a set becomes ``eval_{set}_X``.

    ``eval_accuracy`` is the plain mean over the sets, as the paper averages its columns, with the
    half width of independent sets; ``eval_reward_mean`` likewise.
    """
    logs: dict[str, float] = {}
    for name, metrics in by_set.items():
        for key in SUMMARIES:
            if f"eval_{key}" in metrics:
                logs[f"eval_{name}_{key}"] = metrics[f"eval_{key}"]
        for key in metrics:
            if re.fullmatch(r"eval_pass\d+", key):
                logs[f"eval_{name}_{key.removeprefix('eval_')}"] = metrics[key]
        sources = [m[1] for key in metrics if (m := re.fullmatch(r"eval_(.+)_accuracy", key))]
        for source in sources if len(sources) > 1 else []:
            for key in ("accuracy", "accuracy_ci95", "num_prompts"):
                logs[f"eval_{name}_{source}_{key}"] = metrics[f"eval_{source}_{key}"]
    logs["eval_num_prompts"] = math.fsum(m["eval_num_prompts"] for m in by_set.values())
    for key in ("accuracy", "reward_mean"):
        values = [m[f"eval_{key}"] for m in by_set.values() if f"eval_{key}" in m]
        if values and len(values) == len(by_set):
            logs[f"eval_{key}"] = _mean(values)
    if "eval_accuracy" in logs:
        widths = [m["eval_accuracy_ci95"] for m in by_set.values()]
        logs["eval_accuracy_ci95"] = math.hypot(*widths) / len(widths)
    return logs


def _summary(groups: list[list[Experience]], n: int) -> dict[str, float]:
    samples = [sample for group in groups for sample in group]
    summary = {
        "num_prompts": float(len(groups)),
        "reward_mean": _mean([float(s.rewards[0]) for s in samples]),
        "response_length_mean": _mean([float(s.response_length[0]) for s in samples]),
        "truncated_rate": _mean([float(s.truncated[0]) for s in samples]),
    }
    if all("correct" in s.info for s in samples):
        shares = [_mean([float(s.info["correct"][0]) for s in group]) for group in groups]
        summary["accuracy"] = summary["pass1"] = _mean(shares)
        summary["accuracy_ci95"] = half_width(shares)
        if n > 1:
            any_correct = [float(any(float(s.info["correct"][0]) for s in g)) for g in groups]
            summary[f"pass{n}"] = _mean(any_correct)
    if all("format_ok" in s.info for s in samples):
        summary["format_ok"] = _mean([float(s.info["format_ok"][0]) for s in samples])
    return summary


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
