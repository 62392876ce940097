"""DPPO: a token is masked by how far its probability moved, not by its ratio (arXiv 2602.04879).

The ratio of an unlikely token leaves PPO's clip at once and that of a likely one never does. Here
the divergence between p and p_old decides, of the two-valued distribution {this token, any other},
and only where the update would move the token farther away: A > 0 and p > p_old, or A < 0 and p <
p_old. The default thresholds: 0.2 is verl's for the total variation, and was prime-rl's; by
Pinsker's inequality a binary KL of 2 * 0.2^2 = 0.08 allows no more.

Two differences from the authors' code. There the ratio and the mask compare p with the probability
that the rollout engine sampled with (the mask of its ``recompute`` variants with the trainer's
p_old); here both compare with the trainer's p_old. And its cap on the ratio is 3 by its default
configuration, 10 where that has none; here 20.

IPO, below, masks by the total variation alone, whatever the direction. Its authors' code takes the
engine's p for p_old too, and has no cap.

Gradient in log pi: w min(r, cap) A, 0 where masked. Without a mask and below the cap it is the
policy gradient w r A without any clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.objectives.base import (
    Clip,
    Objective,
    Surrogate,
    Tokens,
    by_sign,
    nowhere,
    scaled,
)
from sg_rlhf.algo.parameters import number

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _Masked(Objective):
    cap: float = number(20.0, "largest r in the gradient", above=0.0)

    def masked(self, p_BT: Tensor, old_p_BT: Tensor, advantages_BT: Tensor) -> Tensor:
        """Where a token has no gradient, bool [B, T]."""
        raise NotImplementedError

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        import torch

        ratio_BT, advantages_BT = tokens.ratio_BT, tokens.advantages_BT
        # In float32 at least: with bfloat16 a probability near 1 has no neighbours.
        old_p_BT = tokens.old_log_probs_BT.to(_at_least_float32(ratio_BT)).clamp(max=0.0).exp()
        p_BT = (old_p_BT * ratio_BT.detach()).clamp(max=1.0)
        masked_BT = (advantages_BT != 0) & self.masked(p_BT, old_p_BT, advantages_BT)
        value_BT = scaled(ratio_BT.clamp(max=self.cap), tokens)
        value_BT = torch.where(masked_BT, value_BT.detach(), value_BT)
        return Surrogate(value_BT, masked_BT, nowhere(value_BT), masked_BT)


@dataclass(frozen=True, kw_only=True)
class _DPPO(_Masked):
    source: ClassVar[str] = "arXiv 2602.04879"

    # Each has its own range and default.
    delta_low: float
    delta_high: float

    def distance(self, p_BT: Tensor, old_p_BT: Tensor) -> Tensor:
        """The divergence between p and p_old, [B, T]."""
        raise NotImplementedError

    def masked(self, p_BT: Tensor, old_p_BT: Tensor, advantages_BT: Tensor) -> Tensor:
        import torch

        away_BT = torch.where(advantages_BT > 0, p_BT > old_p_BT, p_BT < old_p_BT)
        limit_BT = by_sign(advantages_BT, self.delta_high, self.delta_low)
        return away_BT & (self.distance(p_BT, old_p_BT) > limit_BT)


@dataclass(frozen=True, kw_only=True)
class DPPOTV(_DPPO):
    """The gradient is w min(r, cap) A, masked where |p - p_old| > delta (arXiv 2602.04879).

    The unclipped policy gradient for delta = 1.
    """

    name: ClassVar[str] = "dppo_tv"

    delta_low: float = number(0.2, "how far p may fall where A < 0", least=0.0, most=1.0)
    delta_high: float = number(0.2, "how far p may rise where A > 0", least=0.0, most=1.0)

    def distance(self, p_BT: Tensor, old_p_BT: Tensor) -> Tensor:
        return (p_BT - old_p_BT).abs()


@dataclass(frozen=True, kw_only=True)
class IPO(_Masked):
    """The gradient is w min(r, cap) A, masked where |p - p_old| > eps, in both directions.

    prime-rl's default loss since August 2026, with eps = 0.3 and no KL since pull request 3586;
    there is no paper. Unlike DPPO it also masks an update that would bring p back. The unclipped
    policy gradient for eps = 1.
    """

    name: ClassVar[str] = "ipo"
    source: ClassVar[str] = "PrimeIntellect-ai/prime-rl, pull requests 2798 and 3418"

    eps: float = number(0.3, "how far p may move", least=0.0, most=1.0)

    def masked(self, p_BT: Tensor, old_p_BT: Tensor, advantages_BT: Tensor) -> Tensor:
        return (p_BT - old_p_BT).abs() > self.eps


@dataclass(frozen=True, kw_only=True)
class DPPOKL(_DPPO):
    """The gradient is w min(r, cap) A, masked where KL(p_old, p) > delta (arXiv 2602.04879).

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), in nats. The unclipped
    policy gradient for a large delta.
    """

    name: ClassVar[str] = "dppo_kl"

    delta_low: float = number(0.08, "largest KL where A < 0, in nats", least=0.0)
    delta_high: float = number(0.08, "largest KL where A > 0, in nats", least=0.0)

    def distance(self, p_BT: Tensor, old_p_BT: Tensor) -> Tensor:
        import torch

        tiny = torch.finfo(p_BT.dtype).tiny
        other_BT, old_other_BT = 1 - p_BT, 1 - old_p_BT
        kl_BT = torch.xlogy(old_p_BT, old_p_BT / p_BT.clamp(min=tiny))
        return kl_BT + torch.xlogy(old_other_BT, old_other_BT / other_BT.clamp(min=tiny))


def _at_least_float32(x: Tensor) -> torch.dtype:
    import torch

    return torch.float64 if x.dtype == torch.float64 else torch.float32
