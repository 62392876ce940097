"""Random batches and small oracles that the tests of this folder share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from sg_rlhf.algo.policy_loss import policy_loss
from sg_rlhf.algo.weightings import GrpoSG, Uniform
from sg_rlhf.algo.weightings.reverse import Reverse

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
UNIFORM = Uniform()
PRINTED_EQ19 = GrpoSG(form="quotient", allow_constant=True)
PUBLISHED = GrpoSG()
WIDE = GrpoSG(lower=0.5, upper=1.5)
QUOTIENT = GrpoSG(form="quotient", tau=0.3, lower=0.6, upper=1.4)


@dataclass(frozen=True)
class Batch:
    """Four [B, T] tensors in the order of ``policy_loss``; ``log_probs`` requires a gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, rows: slice) -> Batch:
        """Some responses, still part of the same graph."""
        return Batch(
            self.log_probs[rows], self.old_log_probs[rows], self.advantages[rows], self.mask[rows]
        )

    def with_(self, **changes: Tensor) -> Batch:
        return replace(self, **changes)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.log_probs, self.old_log_probs, self.advantages, self.mask


def random_batch(
    seed: int,
    rows: int = 8,
    tokens: int = 11,
    dtype: torch.dtype = torch.float64,
    mask_dtype: torch.dtype = torch.bool,
    empty_row: bool = True,
) -> Batch:
    """Ragged responses, one of them empty; ratios on both sides of the clip; A of every sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    log_probs = -(normal().abs() * 1.5)
    old_log_probs = log_probs + 0.4 * normal()
    advantages = normal()
    advantages[torch.rand(rows, tokens, generator=generator) < 0.1] = 0.0
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    if empty_row:
        lengths[rows // 2] = 0
    mask = torch.arange(tokens) < lengths
    return Batch(
        log_probs.to(dtype).requires_grad_(),
        old_log_probs.to(dtype),
        advantages.to(dtype),
        mask.to(mask_dtype),
    )


def loss_and_metrics(*arguments: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of ``policy_loss``, and the metrics of its statistics."""
    output = policy_loss(*arguments, **options)
    return output.loss, output.statistics.metric_tensors()


def gradient(loss: Tensor, log_probs: Tensor) -> Tensor:
    return torch.autograd.grad(loss, log_probs, retain_graph=True)[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, where -0.0 and 0.0 are the same number."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
    kind = integer[a.dtype]
    return torch.equal((a + 0.0).contiguous().view(kind), (b + 0.0).contiguous().view(kind))


def reverse_of(cfg: GrpoSG) -> Reverse:
    return Reverse(**cfg.parameters())


def weight_by_hand(p: float, cfg: GrpoSG) -> float:
    """Eq. 19 of arXiv 2511.00066 in plain Python, without torch."""
    f = cfg.tau * p if cfg.form == "product" else p / cfg.tau
    weight = cfg.alpha * (1.0 / (1.0 + math.exp(-f)) - cfg.mu)
    return min(max(weight, cfg.lower), cfg.upper)
