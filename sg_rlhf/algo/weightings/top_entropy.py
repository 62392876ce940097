"""Train only the tokens at whose position the policy is least sure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TopEntropy(Weighting):
    """w = 1 for the share of tokens with the highest entropy, else 0 (80/20, arXiv 2506.01939).

    The threshold is a quantile over all tokens of the rollout under the policy that sampled
    (``TokenContext.entropy_threshold``), one number, so that no token's weight depends on how a
    batch is cut; without it, over the tokens of the batch given. The paper takes it over the
    training batch, under the current policy. The token mean stays over all tokens. GRPO
    for share = 1.
    """

    name: ClassVar[str] = "top_entropy"
    source: ClassVar[str] = "arXiv 2506.01939"
    uses: ClassVar[tuple[str, ...]] = ("entropy",)

    share: float = number(0.2, "of tokens that take part", above=0.0, most=1.0)

    def prepare(self, context: TokenContext, mask_BT: Tensor) -> TokenContext:
        if context.entropy_threshold is not None:
            return context
        entropy_BT = context.require("entropy", self.name)
        return dataclasses.replace(context, entropy_threshold=self.threshold(entropy_BT, mask_BT))

    def threshold(self, entropy: Tensor, mask: Tensor | None = None) -> Tensor:
        """The entropy that ``share`` of these tokens have at least; -inf for all of them.

        A 0-d tensor; the tokens are those whose mask is not 0, or all. A sort and not a selection:
        how many tokens there are stays on the device, and nothing waits for it.
        """
        import torch

        valid = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask != 0
        if entropy.numel() == 0:
            return entropy.new_full((), -math.inf)
        # NaN sorts behind everything, so the tokens that count come first.
        ascending_N = entropy.masked_fill(~valid, math.nan).flatten().sort().values
        n = valid.sum()
        kept = (self.share * n.double()).round().clamp(min=1)
        least = ascending_N.gather(0, (n - kept).clamp(min=0).long().reshape(1))[0]
        # All of them: not the least entropy, as another pass over the same tokens rounds otherwise.
        return torch.where(kept >= n, -math.inf, least)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        entropy_BT = context.require("entropy", self.name)
        if context.entropy_threshold is None:
            raise ValueError(f"weighting {self.name}: expected entropy_threshold, got None")
        return (entropy_BT >= context.entropy_threshold).to(p_BT.dtype)

    def bounds(self) -> tuple[float, float]:
        return (0.0 if self.share < 1 else 1.0, 1.0)
