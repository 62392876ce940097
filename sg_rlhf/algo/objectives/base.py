"""What every objective is: the surrogate J of a token, given its ratio, weight and advantage.

torch is imported where a tensor is at hand and not at the top of these files, so that recipes are
checked in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import Parameters

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """The PPO clip: r, or w r with the weight inside, is held to [1 - eps_low, 1 + eps_high].

    dual_clip (arXiv 1912.09729): a token with A < 0 gives at least dual_clip * A; None without.
    """

    eps_low: float
    eps_high: float
    dual_clip: float | None
    weight_inside: bool


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens, all [B, T]: r with a gradient, w without, A, and p_old."""

    ratio_BT: Tensor
    weights_BT: Tensor
    advantages_BT: Tensor
    old_log_probs_BT: Tensor


@dataclass(frozen=True)
class Surrogate:
    """J to maximise, where a clip acted, and where no policy gradient is left; all [B, T]."""

    value_BT: Tensor
    clipped_BT: Tensor
    dual_clipped_BT: Tensor
    zeroed_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class Objective(Parameters):
    """One policy objective. A subclass is a frozen dataclass with its parameters as fields, its
    formula in the first line of its docstring, and ``surrogate``.

    takes_inside: whether a weight may sit inside its clip.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    takes_inside: ClassVar[bool] = False

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        """J of each token, weighted."""
        raise NotImplementedError


def with_constant(value_BT: Tensor, ratio_BT: Tensor) -> Tensor:
    """``value_BT`` without its gradient, times r / sg(r): the gradient in log pi is the value."""
    return value_BT.detach() * (ratio_BT / ratio_BT.detach())


def nowhere(like_BT: Tensor) -> Tensor:
    """False everywhere."""
    import torch

    return torch.zeros_like(like_BT, dtype=torch.bool)
