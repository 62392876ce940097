"""Token weightings by name: what each sampled token's weight is a function of.

Most are functions of p alone, the token's probability under the current policy, held constant in
the gradient. The baselines need more: the probability under the policy that sampled, the sign of
the advantage, the entropy at the position, or the identity of the token (``TokenContext``).

To add a weighting: one function ``(p_BT, cfg, context) -> w_BT`` and one line in ``SHAPINGS``.
The first line of its docstring is what ``python -m sg_rlhf.train --help`` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sg_rlhf.algo.shaping import TokenWeightConfig


@dataclass(frozen=True)
class TokenContext:
    """What a weighting may know of each sampled token besides p; all [B, T] or None.

    old_log_probs: log-probabilities under the policy that sampled. advantages. entropy: of the
    current policy at the position, in nats. keys: int64, one per token of a rollout, see
    ``token_keys``. Nothing here carries a gradient.
    """

    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None
    keys: Tensor | None = None

    def require(self, name: str, shaping: str) -> Tensor:
        """One of the fields; ``ValueError`` where the caller has not got it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"shaping={shaping}: expected {name} of each token, got None")
        return value.detach()


Weigh = Callable[[Tensor, "TokenWeightConfig", TokenContext], Tensor]
Bounds = Callable[["TokenWeightConfig"], tuple[float, float]]
Mean = Callable[["TokenWeightConfig"], float]


@dataclass(frozen=True)
class Shaping:
    """A weighting: its function, what it reads besides p, its range and mean where p does not tell.

    bounds: (min, max) of the weight; None where a curve over p in [0, 1] gives it. mean: of the
    weight over p = p_old uniform on (0, 1); None where the curve gives it, or nothing does.
    """

    weigh: Weigh
    uses: tuple[str, ...] = ()
    bounds: Bounds | None = None
    mean: Mean | None = None

    @property
    def summary(self) -> str:
        return (self.weigh.__doc__ or "").strip().split("\n")[0]


def uniform(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w = 1: plain GRPO (arXiv 2402.03300). None of the constants is used."""
    return torch.ones_like(p_BT)


def grpo_sg(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w = clip(alpha * (sigmoid(f(p)) - mu), L, U): GRPO-SG (arXiv 2511.00066, Eq. 19).

    f(p) = tau * p (form ``product``) or p / tau (``quotient``). GRPO for L = U = 1.
    """
    f_BT = p_BT * cfg.tau if cfg.form == "product" else p_BT / cfg.tau
    return (cfg.alpha * (torch.sigmoid(f_BT) - cfg.mu)).clamp(cfg.lower, cfg.upper)


def reverse(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w = 2 - w of GRPO-SG: likely tokens get less, an ablation (arXiv 2511.00066, App. C.4).

    GRPO for L = U = 1.
    """
    return 2.0 - grpo_sg(p_BT, cfg, context)


def random(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w ~ U[1 - s, 1 + s], s = random_spread: noise of the same size, an ablation (App. C.4).

    Drawn by a hash of random_seed and the token's key, so that a token has the same weight in
    every micro-batch, on every rank and in every epoch. GRPO for s = 0.
    """
    keys_BT = context.require("keys", "random")
    seed = torch.tensor(cfg.random_seed, dtype=torch.int64, device=keys_BT.device)
    # 53 bits make a double in [0, 1).
    unit_BT = _shifted(_mixed(keys_BT + _mixed(seed)), 11).double() * 2.0**-53
    return (1.0 + cfg.random_spread * (2.0 * unit_BT - 1.0)).to(p_BT.dtype)


def advantage_reweighting(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w = a * p_old + 1 - a, a = ar_alpha: advantage reweighting (AR, arXiv 2505.12929).

    It multiplies the advantage, so the clip does not see it: placement ``outside``. p_old is the
    probability under the policy that sampled. GRPO for a = 0.
    """
    old_p_BT = context.require("old_log_probs", "ar").to(p_BT.dtype).clamp(max=0.0).exp()
    return cfg.ar_alpha * old_p_BT + (1.0 - cfg.ar_alpha)


def stapo(p_BT: Tensor, cfg: TokenWeightConfig, context: TokenContext) -> Tensor:
    """w = 0 where A > 0, p < stapo_prob and entropy < stapo_entropy, else 1 (arXiv 2602.15620).

    The mask of rare spurious tokens. The paper sets the entropy threshold by a quantile of the
    batch; here it is a number in nats, so that no token's mask depends on how a batch is cut. The
    token mean is still over all tokens: it differs by the masked share, about 1e-4 in the paper.
    GRPO for stapo_prob = 0.
    """
    advantages_BT = context.require("advantages", "stapo")
    entropy_BT = context.require("entropy", "stapo")
    spurious_BT = (advantages_BT > 0) & (p_BT < cfg.stapo_prob) & (entropy_BT < cfg.stapo_entropy)
    return torch.ones_like(p_BT).masked_fill(spurious_BT, 0.0)


SHAPINGS: dict[str, Shaping] = {
    "uniform": Shaping(uniform),
    "grpo_sg": Shaping(grpo_sg),
    "reverse": Shaping(reverse),
    "random": Shaping(
        random,
        uses=("keys",),
        bounds=lambda cfg: (1.0 - cfg.random_spread, 1.0 + cfg.random_spread),
        mean=lambda cfg: 1.0,
    ),
    "ar": Shaping(
        advantage_reweighting,
        uses=("old_log_probs",),
        bounds=lambda cfg: (1.0 - cfg.ar_alpha, 1.0),
        mean=lambda cfg: 1.0 - cfg.ar_alpha / 2,
    ),
    "stapo": Shaping(
        stapo,
        uses=("advantages", "entropy"),
        bounds=lambda cfg: (0.0 if cfg.stapo_prob > 0 else 1.0, 1.0),
    ),
}


def token_keys(sequences_BS: Tensor, attention_mask_BS: Tensor) -> Tensor:
    """int64 keys [..., S - 1] of the tokens after the first: what ``random`` draws by.

    A key is a hash of the whole sequence without its padding and of the position in it, so it
    does not change with the padding, the order of a batch or the rank that holds it. Equal
    sequences have equal keys.
    """
    valid_BS = attention_mask_BS != 0
    position_BS = valid_BS.long().cumsum(-1)
    tokens_BS = _mixed(sequences_BS.long() + _mixed(position_BS))
    sequence_B1 = tokens_BS.masked_fill(~valid_BS, 0).sum(-1, keepdim=True)
    return _mixed(_mixed(sequence_B1) + position_BS)[..., 1:]


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (doi 10.1145/2714064.2660195), in wrapping int64."""
    x = x + _INCREMENT
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


_INCREMENT = _int64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_int64(0xBF58476D1CE4E5B9), _int64(0x94D049BB133111EB))
