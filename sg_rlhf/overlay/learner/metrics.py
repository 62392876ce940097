"""What an update logs: means, a row per optimizer step, values per token, seconds and memory.

No micro-batch waits for the device: sums stay there until an optimizer step ends.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from torch.distributed import ProcessGroup

from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.learner.micro_batches import SAMPLE_INDEX

GIB = 2**30
#: On the device, or in seconds on the host without CUDA.
PointInTime = torch.cuda.Event | float

#: Token statistics that have another name than ``sg/...``: mostly upstream's.
RENAMED = {
    "ppo_kl": "ppo_kl", "clip_ratio": "ppo_clip_ratio", "mismatch_kl": "vllm_kl",
}  # fmt: skip
#: Short names of the progress bar -> metrics.
_PROGRESS_BAR = {
    "act_loss": "policy_loss", "reward": "reward", "return": "return",
    "gen_len": "response_length", "tot_len": "total_length", "kl": "kl", "act_lr": "actor_lr",
    "grad_norm": "actor_grad_norm", "ent_loss": "entropy_loss",
}  # fmt: skip


def logged_names(metrics: dict[str, float]) -> dict[str, float]:
    """Token statistics by the names that they have in a row."""
    ours = {f"sg/{name}": metrics[name] for name in metrics if name not in RENAMED}
    return {name: metrics[key] for key, name in RENAMED.items()} | ours


def sample_metrics(experience: Experience) -> dict[str, Tensor]:
    """Upstream's logged values of a micro-batch: ``info``, and fields with a value per sample."""
    metrics: dict[str, Tensor] = {}
    for name, value in experience.info.items():
        if isinstance(value, Tensor):
            metrics[name] = value
        elif isinstance(value, list):
            metrics[name] = torch.tensor(value, dtype=torch.float)
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if (
            Experience.is_episode_tensor_field(field.name)
            and field.name not in {"rewards", "scores", *metrics}
            and isinstance(value, Tensor)
        ):
            metrics[field.name] = value
    return metrics


@dataclass(frozen=True)
class MicroBatchMetrics:
    """The metrics of one micro-batch on this rank; tensors on any device, without a gradient.

    Attributes:
        means: a scalar is a mean over the response tokens; [B] has a value per sample. The names of
            ``terms`` are among them.
        terms: the terms of the loss, scalars: shares of the optimizer step's mean.
        terms_per_step: turns the mean of the terms over the micro-batches into the step's mean.
        tokens_per_rank: response tokens of the optimizer step divided by the ranks.
        mismatch: [2], sum of abs(old - engine's log-prob) and number of tokens.
        failed: bool scalar: the loss is not finite; the micro-batch has no part in a mean.
        num_tokens: response tokens; 0 takes the micro-batch out of all means.
    """

    means: dict[str, Tensor]
    terms: dict[str, Tensor]
    terms_per_step: float
    tokens_per_rank: Tensor | float
    statistics: TokenStatistics
    mismatch: Tensor
    failed: Tensor
    num_tokens: int
    num_samples: int

    def is_of_tokens(self, name: str) -> bool:
        """Whether a mean is over tokens; else over samples."""
        return self.means[name].dim() == 0


@dataclass(frozen=True)
class StepTotals:
    """Per micro-batch of this rank, whether it failed; mean mismatch over all ranks, or None."""

    failed: list[bool]
    mismatch: float | None


class UpdateLog:
    """The rows of ``optimizer_steps.jsonl`` of one update, and the update's means."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.rows: list[dict[str, Any]] = []
        self.statistics = TokenStatistics.zeros()
        self._pending: list[MicroBatchMetrics] = []
        # Weighted sums and weights since the last `pop_means`, by metric.
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._latest: dict[str, float] = {}
        self._bar: dict[str, float] = {}
        self.discard_step()

    def discard_step(self) -> None:
        """Start a row; drops the part of a step that was not taken."""
        self._step_statistics = TokenStatistics.zeros()
        self._step_terms: defaultdict[str, float] = defaultdict(float)
        self._micro_batches = 0

    def add(self, metrics: MicroBatchMetrics) -> None:
        """Add a micro-batch of the present optimizer step; does not wait for the device."""
        self._pending.append(metrics)

    def reduce(self) -> StepTotals:
        """Sum the added micro-batches over all ranks, read the sums once; on every rank."""
        pending, self._pending = self._pending, []
        first, device = pending[0], torch.cuda.current_device()
        failed_M = torch.stack([metrics.failed for metrics in pending]).to(device)
        weights = [[float(m.num_tokens), float(m.num_samples)] for m in pending]
        weights_M2 = torch.tensor(weights, dtype=torch.float64).to(device)
        values_MK = torch.stack([_values(metrics, device) for metrics in pending])
        # A micro-batch without tokens has means that are NaN.
        counted_M1 = (~failed_M & (weights_M2[:, 0] > 0))[:, None]
        sums = torch.cat([values_MK, weights_M2], dim=1).masked_fill(~counted_M1, 0.0).sum(0)
        statistics = sum((m.statistics for m in pending[1:]), first.statistics)
        packed = torch.cat([statistics.sums.to(device), sums])
        torch.distributed.all_reduce(packed, group=self._group)
        largest = statistics.maxima().to(device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._group)
        read = torch.cat([packed, largest, failed_M.double()]).cpu()
        parts = [statistics.sums.numel(), sums.numel(), largest.numel(), len(pending)]
        statistic_sums, sums, largest, failed_M = torch.split(read, parts)
        self._micro_batches += len(pending)
        self._step_statistics += TokenStatistics(statistic_sums, statistics.weight_bounds, largest)
        ranks = torch.distributed.get_world_size(group=self._group)
        *values, tokens, samples = sums.tolist()
        for name in first.terms:
            self._step_terms[name] += values.pop(0) / ranks
        for name in first.means:
            weight = tokens if first.is_of_tokens(name) else samples
            value = values.pop(0)
            self._sums[name] += value
            self._weights[name] += weight
            self._bar[name] = _ratio(value, weight)
        difference, compared = values
        return StepTotals(
            failed_M.bool().tolist(), _ratio(difference, compared) if compared else None
        )

    def close_step(self, step: int, grad_norm: float, learning_rate: float) -> None:
        """Append the row of an optimizer step."""
        count, total = self._micro_batches, self._step_statistics
        self.rows.append(
            {
                "optimizer_step": step,
                "actor_grad_norm": grad_norm,
                "actor_lr": learning_rate,
                "micro_batches": count,
                **{name: value / count for name, value in self._step_terms.items()},
                **logged_names(total.metrics()),
                "sg/prob_hist": total.histogram("prob_hist").tolist(),
            }
        )
        self.statistics += total
        self.discard_step()

    def set_latest(self, **values: float) -> None:
        """Set values of which an update logs the last one."""
        self._latest |= values

    def progress(self) -> dict[str, float]:
        """The values of the progress bar: of the latest optimizer step, over all ranks."""
        values = self._bar | self._latest
        return {short: values[name] for short, name in _PROGRESS_BAR.items() if name in values}

    def pop_means(self) -> dict[str, float]:
        """The means since the last call, and the latest values."""
        means = {name: _ratio(total, self._weights[name]) for name, total in self._sums.items()}
        self._sums.clear()
        self._weights.clear()
        return means | self._latest


def _values(metrics: MicroBatchMetrics, device: torch.device | int) -> Tensor:
    """float64: terms, weighted means and mismatch of a micro-batch; no wait for the device."""
    terms = [term * metrics.terms_per_step for term in metrics.terms.values()]
    weighted = []
    for name, value in metrics.means.items():
        if name in metrics.terms:
            weighted.append(metrics.terms[name].double() * metrics.tokens_per_rank)
        else:
            weight = metrics.num_tokens if value.dim() == 0 else metrics.num_samples
            weighted.append(value.float().mean().double() * weight)
    scalars = [value.detach().double().to(device) for value in (*terms, *weighted)]
    return torch.cat([torch.stack(scalars), metrics.mismatch.to(device)])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


@dataclass(frozen=True)
class _TokenValues:
    """One sample: its mask [T] on the CPU, and values [T or longer] that may be on the device."""

    mask_T: Tensor
    values: dict[str, Tensor]

    def lists(self) -> dict[str, list[float]]:
        """The values of the response tokens; waits for the device."""
        length = len(self.mask_T)
        return {
            name: row[:length].float().cpu()[self.mask_T].tolist()
            for name, row in self.values.items()
        }


class TokenRecord:
    """Log-probs and entropies of one rank's samples in the latest update, at their first pass."""

    def __init__(self) -> None:
        self._values: dict[int, _TokenValues] = {}

    def clear(self) -> None:
        """Forget the previous update."""
        self._values = {}

    def keep(self, items: list[Experience], **values: Tensor | None) -> None:
        """Keep [B, T] values by their names in ``samples.jsonl``; does not wait for the device."""
        kept = {name: rows.detach() for name, rows in values.items() if rows is not None}
        for i, item in enumerate(items):
            row = _TokenValues(
                item.action_mask.bool(), {name: rows[i] for name, rows in kept.items()}
            )
            self._values.setdefault(int(item.info[SAMPLE_INDEX]), row)

    def lookup(self, indices: Iterable[int]) -> list[dict[str, list[float]] | None]:
        """For each sample, field -> value per response token; None if another rank trained it."""
        rows = (self._values.get(index) for index in indices)
        return [None if row is None else row.lists() for row in rows]


def reset_memory_peak() -> None:
    """Start a new peak of memory, before an update."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def memory_usage() -> dict[str, float]:
    """Memory of this rank in GiB.

    ``device_used`` is of all processes. The allocator still has its cache, so it is about the peak.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    free, total = torch.cuda.mem_get_info()
    return {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/device_used_gib": (total - free) / GIB,
    }


def max_memory_over_ranks(strategy: Strategy) -> dict[str, float]:
    """The memory metrics, each the largest of all ranks; every rank must call it."""
    largest: dict[str, float] = strategy.all_reduce(memory_usage(), op="max")
    return largest


def now() -> PointInTime:
    """The present."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(start: PointInTime, end: PointInTime) -> float:
    """Seconds between two points; on CUDA ``end`` must be past, or the host waits for it."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
