"""Base class of objectives: the surrogate J of a token, given its ratio, weight and advantage.

torch is imported inside functions, so that checking a recipe takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import Parameters

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """The PPO clip: r, or w r with the weight inside, is limited to [1 - eps_low, 1 + eps_high].

    ``dual_clip``: a token with A < 0 gives at least dual_clip A (arXiv 1912.09729), or None.
    """

    eps_low: float
    eps_high: float
    dual_clip: float | None
    weight_inside: bool


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens: r with gradient, w without, A, and log p_old; all [B, T]."""

    ratio_BT: Tensor
    weights_BT: Tensor
    advantages_BT: Tensor
    old_log_probs_BT: Tensor


@dataclass(frozen=True)
class Surrogate:
    """What an objective returns, all [B, T].

    Attributes:
        value_BT: J, to be maximised.
        clipped_BT: bool, where the clip acted.
        dual_clipped_BT: bool, where dual clip acted.
        zeroed_BT: bool, where no policy gradient is left.
    """

    value_BT: Tensor
    clipped_BT: Tensor
    dual_clipped_BT: Tensor
    zeroed_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class Objective(Parameters):
    """One policy objective.

    A subclass is a frozen dataclass with its parameters as fields, its formula in the first line of
    its docstring, and ``surrogate``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    takes_inside: ClassVar[bool] = False

    def surrogate(self, tokens: Tokens, clip: Clip) -> Surrogate:
        """J of each token, weighted; an objective without a clip ignores ``clip``."""
        raise NotImplementedError


def scaled(scale_BT: Tensor, tokens: Tokens) -> Tensor:
    """w * scale * A in value, scale without a gradient, with w * scale * A as gradient in log pi.

    Computed as sg(scale / r) * r * A, which rounds as r * A does where the scale is r.
    """
    ratio_BT = tokens.ratio_BT
    constant_BT = scale_BT.detach() / ratio_BT.detach()
    return tokens.weights_BT * (constant_BT * ratio_BT * tokens.advantages_BT)


def by_sign(advantages_BT: Tensor, positive: float, negative: float) -> Tensor:
    """One number where A > 0 and another elsewhere, in the dtype of the advantages."""
    import torch

    return torch.where(
        advantages_BT > 0,
        torch.full_like(advantages_BT, positive),
        torch.full_like(advantages_BT, negative),
    )


def nowhere(like_BT: Tensor) -> Tensor:
    """False everywhere."""
    import torch

    return torch.zeros_like(like_BT, dtype=torch.bool)
