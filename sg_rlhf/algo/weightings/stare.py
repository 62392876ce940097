"""Raise the rare tokens of correct responses while the policy's entropy is low."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sg_rlhf.algo.parameters import choice, number
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stare(Weighting):
    """w = W for the rarest share of tokens with A > 0, M for those with A < 0, else 1 (STARE).

    arXiv 2606.19236, Sections 4.1 to 4.3, as the authors' code has it (github.com/hp-luo/STARE,
    ``compute_stare_token_weights``). Rare means a high surprisal s = -log p. All weights are 1
    while the mean entropy is at or above ``target_entropy``. M = 1 is the authors' variant O1,
    M = 0.9 their C2. GRPO for W = M = 1.

    Three differences. The rank of s and the entropy are those of the whole rollout under the policy
    that sampled (``TokenContext.surprisal_cuts``), so that no token's weight depends on how a batch
    is cut; the authors rank within a micro-batch under the current policy. The entropy is the mean
    of s, which estimates it without a bias at temperature 1. The adaptive W and M of Section 4.4
    are not here.
    """

    name: ClassVar[str] = "stare"
    source: ClassVar[str] = "arXiv 2606.19236"
    uses: ClassVar[tuple[str, ...]] = ("old_log_probs", "advantages")

    placement: str = choice("outside", ("outside",), "it multiplies the clipped surrogate")
    share: float = number(0.1, "of the tokens of one sign, the rarest", above=0.0, most=1.0)
    raised: float = number(1.1, "W, weight of the rare tokens with A > 0", least=0.0)
    lowered: float = number(1.0, "M, weight of the rare tokens with A < 0 (C2: 0.9)", least=0.0)
    target_entropy: float = number(
        0.3, "weights act while the mean entropy in nats is below", least=0.0
    )

    def prepare(self, context: TokenContext, mask_BT: Tensor) -> TokenContext:
        if context.surprisal_cuts is not None:
            return context
        cuts = self.cuts(
            context.require("old_log_probs", self.name),
            context.require("advantages", self.name),
            mask_BT,
        )
        return dataclasses.replace(context, surprisal_cuts=cuts)

    def cuts(self, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """The least surprisal of the chosen tokens with A > 0, and with A < 0.

        Args:
            old_log_probs: of sampled tokens, any shape.
            advantages: same shape.
            mask: same shape, not 0 on the tokens that count.

        Returns:
            [2]; infinite where no token is chosen, as while the entropy is at the target or above.
            Nothing waits for a count: it stays on the device.
        """
        import torch

        surprisal, valid = -old_log_probs, mask != 0
        mean = surprisal.masked_fill(~valid, 0.0).sum() / valid.sum()
        found = []
        for chosen in (valid & (advantages > 0), valid & (advantages < 0)):
            # -inf sorts behind every surprisal.
            ordered = surprisal.masked_fill(~chosen, -torch.inf).flatten().sort(descending=True)
            n = chosen.sum()
            # Rounded first: .1 * 70 is slightly above 7 in float64.
            last = ((self.share * n.double()).round(decimals=9).ceil().long() - 1).clamp(min=0)
            least = ordered.values.gather(0, last.reshape(1))[0]
            found.append(torch.where((n > 0) & (mean < self.target_entropy), least, torch.inf))
        return torch.stack(found)

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        if context.surprisal_cuts is None:
            raise ValueError(f"weighting {self.name}: expected surprisal_cuts, got None")
        advantages_BT = context.require("advantages", self.name)
        surprisal_BT = -context.require("old_log_probs", self.name)
        above, below = context.surprisal_cuts
        weights_BT = p_BT.new_ones(p_BT.shape)
        raised_BT = (advantages_BT > 0) & (surprisal_BT >= above)
        lowered_BT = (advantages_BT < 0) & (surprisal_BT >= below)
        return weights_BT.masked_fill(raised_BT, self.raised).masked_fill(lowered_BT, self.lowered)

    def bounds(self) -> tuple[float, float]:
        values = (1.0, self.raised, self.lowered)
        return min(values), max(values)
