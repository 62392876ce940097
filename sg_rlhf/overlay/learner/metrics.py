"""Metrics of an update: means over its micro-batches and ranks, and a row per optimizer step."""

from __future__ import annotations

import statistics
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.algo.analysis.token_statistics import TokenStatistics

#: Token statistics that have another name than ``sg/...``: mostly upstream's.
RENAMED = {
    "ppo_kl": "ppo_kl", "clip_ratio": "ppo_clip_ratio", "mismatch_kl": "vllm_kl",
    "mismatch_bitwise_frac": "mismatch/bitwise_frac",
}  # fmt: skip
#: Token statistics that a row has under another name.
LOGGED_ELSEWHERE = (
    *RENAMED, "policy_loss_token_mean", "kl_mean", "n_kl_tokens", "response_length",
)  # fmt: skip
#: Short names of the progress bar -> metrics.
_PROGRESS_BAR = {
    "act_loss": "policy_loss", "reward": "reward", "return": "return",
    "gen_len": "response_length", "tot_len": "total_length", "kl": "kl", "act_lr": "actor_lr",
    "grad_norm": "actor_grad_norm", "ent_loss": "entropy_loss",
}  # fmt: skip


def logged_names(metrics: dict[str, float]) -> dict[str, float]:
    """Token statistics by the names that they have in a row."""
    ours = {f"sg/{name}": metrics[name] for name in metrics if name not in LOGGED_ELSEWHERE}
    return {name: metrics[key] for key, name in RENAMED.items()} | ours


def sample_metrics(experience: Any) -> dict[str, torch.Tensor]:
    """Upstream's logged values of a micro-batch: ``info``, and fields with a value per sample."""
    metrics: dict[str, torch.Tensor] = {}
    for name, value in experience.info.items():
        if isinstance(value, torch.Tensor):
            metrics[name] = value
        elif isinstance(value, list):
            metrics[name] = torch.tensor(value, dtype=torch.float)
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if (
            Experience.is_episode_tensor_field(field.name)
            and field.name not in {"rewards", "scores", *metrics}
            and isinstance(value, torch.Tensor)
        ):
            metrics[field.name] = value
    return metrics


class MicroBatchMetrics(NamedTuple):
    """The metrics of one micro-batch on this rank.

    Attributes:
        means: a scalar tensor is a mean over the response tokens; [B] has a value per sample.
        latest: values of which an update logs the last one.
        num_tokens: response tokens. 0 takes the micro-batch out of all means.
        num_samples: B.
    """

    means: dict[str, torch.Tensor]
    latest: dict[str, float]
    num_tokens: int
    num_samples: int


class UpdateMeans:
    """Means of an update's metrics over its micro-batches and ranks, weighted as upstream does.

    Args:
        strategy: upstream's, whose ``all_reduce`` gives the mean over ranks.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._reduced: list[dict[str, float]] = []
        self._latest: dict[str, float] = {}
        self._per_token: set[str] = set()

    def add(self, metrics: MicroBatchMetrics) -> dict[str, float]:
        """Add a micro-batch; every rank must call it.

        Returns:
            The values of the progress bar, over all ranks.
        """
        tokens, samples = float(metrics.num_tokens), float(metrics.num_samples)
        if not tokens:
            samples = 0.0
        totals = {"tokens": tokens, "samples": samples}
        for name, value in metrics.means.items():
            weight = tokens if value.dim() == 0 else samples
            if value.dim() == 0:
                self._per_token.add(name)
            # A mean over no token is NaN.
            totals[f"mean/{name}"] = value.float().mean().item() * weight if weight else 0.0
        totals = self._strategy.all_reduce(totals)
        reduced = {
            name: _ratio(totals[f"mean/{name}"], totals[self._weight(name)])
            for name in metrics.means
        }
        self._reduced.append({**totals, **reduced})
        self._latest |= metrics.latest
        values = {**metrics.latest, **reduced}
        return {short: values[name] for short, name in _PROGRESS_BAR.items() if name in values}

    def _weight(self, name: str) -> str:
        return "tokens" if name in self._per_token else "samples"

    def result(self) -> dict[str, Any]:
        """The update's means and latest values."""
        names = {
            key.removeprefix("mean/")
            for reduced in self._reduced
            for key in reduced
            if key.startswith("mean/")
        }
        totals = {
            weight: sum(reduced[weight] for reduced in self._reduced)
            for weight in ("tokens", "samples")
        }
        means = {}
        for name in names:
            weight = self._weight(name)
            total = sum(reduced.get(name, 0) * reduced[weight] for reduced in self._reduced)
            means[name] = _ratio(total, totals[weight])
        return {**means, **self._latest}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


class StepLog:
    """The rows of ``optimizer_steps.jsonl`` of one update.

    Args:
        strategy: upstream's.

    Attributes:
        rows: one of each optimizer step that was taken.
        statistics: token statistics of all these steps and ranks.
    """

    def __init__(self, strategy: Any) -> None:
        self._group = strategy.ds_device_mesh["dp"].get_group()
        self.rows: list[dict[str, Any]] = []
        self.statistics = TokenStatistics.zeros()
        self._losses: list[dict[str, float]] = []

    def add_micro_batch(self, losses: dict[str, float]) -> None:
        """Add the loss terms of a micro-batch of the present optimizer step."""
        self._losses.append(losses)

    def discard_step(self) -> None:
        """Drop the micro-batches of a step that was not taken."""
        self._losses = []

    def close_step(
        self, step: int, grad_norm: float, learning_rate: float, local: TokenStatistics
    ) -> None:
        """Append the row of an optimizer step; every data-parallel rank must call it.

        Args:
            step: its number in the run.
            grad_norm: of all ranks, before it is clipped.
            learning_rate: after the step.
            local: token statistics of this rank's micro-batches.
        """
        names = list(self._losses[0])
        losses = [statistics.fmean(losses[name] for losses in self._losses) for name in names]
        total, losses = self._reduce(local, losses)
        self.rows.append(
            {
                "optimizer_step": step,
                "actor_grad_norm": grad_norm,
                "actor_lr": learning_rate,
                "micro_batches": len(self._losses),
                **dict(zip(names, losses, strict=True)),
                **logged_names(total.metrics()),
                "sg/prob_hist": total.histogram("prob_hist").tolist(),
            }
        )
        self._losses = []
        self.statistics += total

    def _reduce(
        self, local: TokenStatistics, losses: list[float]
    ) -> tuple[TokenStatistics, list[float]]:
        """Sum the statistics and average the losses over data-parallel ranks."""
        device = torch.cuda.current_device()
        ranks = torch.distributed.get_world_size(group=self._group)
        packed = torch.cat(
            [local.sums.to(device), torch.tensor(losses, dtype=torch.float64, device=device)]
        )
        torch.distributed.all_reduce(packed, group=self._group)
        largest = local.maxima().to(device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._group)
        packed = packed.cpu()
        count = local.sums.numel()
        total = TokenStatistics(packed[:count], local.weight_bounds, largest.cpu())
        return total, (packed[count:] / ranks).tolist()
