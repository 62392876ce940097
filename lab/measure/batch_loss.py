"""Losses of a fixed batch, computed in several passes, for sharpness and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab.measure.checkpoint import PASS_TOKENS, Responses, passes, responses
from lab.measure.fixed_batch import FixedBatch
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import TokenContext, Uniform, Weighting

UNIFORM = Uniform()


@dataclass(frozen=True)
class Surrogate:
    """The clipped surrogate of a run (see ``policy_loss``); the paper's clip by default."""

    weights: Weighting = UNIFORM
    eps_low: float = 0.2
    eps_high: float = 0.24
    dual_clip: float | None = 10.0
    token_level: bool = True

    def describe(self) -> str:
        """One line for people."""
        clip = f"clip {self.eps_low:g}/{self.eps_high:g}, dual clip {self.dual_clip}"
        mean = "token mean" if self.token_level else "mean of responses"
        normalize = f", normalize {self.weights.normalize}" if self.weights.normalize else ""
        return f"{self.weights.describe()}{normalize}, {clip}, {mean}"


@dataclass(frozen=True)
class Centre:
    """One pass at the parameters where the measurement starts, all [B, T]; no gradient."""

    log_probs_BT: Tensor
    mask_BT: Tensor
    keys_BT: Tensor
    entropy_BT: Tensor | None


class BatchLoss:
    """The loss L for ``lab.measure.ascent``: a call gives one part of L per pass.

    ``surrogate`` None: the mean negative log-likelihood of the responses' tokens.

    Otherwise minus the surrogate J of Eq. 13, with the old log-probs those of this model at
    construction: the ratio is 1 at the centre, so that each checkpoint is measured at its own first
    update. **The weights are held** at their values at the centre, as the stop-gradient of Eq. 19
    says: L is then a function of theta' alone whose gradient at theta is the update's. Weights
    recomputed at theta' would move L in ways that its gradient leaves out. What a weighting reads
    besides p is that of the centre too, where the policy that samples is the one that is updated,
    and the engine's p is this model's.
    The KL term is left out. centre: what ``centre`` of a loss of this batch gave, where several
    share it.

    Raises:
        MeasureError: the surrogate of a batch without advantages, or with none that is not 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: FixedBatch,
        surrogate: Surrogate | None,
        *,
        pass_tokens: int = PASS_TOKENS,
        centre: Sequence[Centre] | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._surrogate = surrogate
        self._passes = list(passes(batch.rows, pass_tokens))
        self._held: list[_Held] | None = None
        if surrogate is not None:
            found = self.centre([surrogate]) if centre is None else centre
            self._held = self._hold(surrogate, batch.advantages(), found)

    def __call__(self) -> Iterator[Tensor]:
        for number, passed in enumerate(self.forward()):
            yield self.piece(number, passed)

    def forward(self) -> Iterator[Responses]:
        """Iterate over the passes of L, for ``piece``."""
        for indices in self._passes:
            rows = [self._batch.rows[i] for i in indices]
            yield responses(self._model, rows, self._batch.temperature)

    @torch.no_grad()
    def centre(self, surrogates: Sequence[Surrogate]) -> list[Centre]:
        """The constants of these surrogates for each pass."""
        entropy = any("entropy" in surrogate.weights.reads for surrogate in surrogates)
        return [
            Centre(
                passed.log_probs_BT(),
                passed.mask_BT,
                passed.keys_BT(),
                passed.entropy_BT() if entropy else None,
            )
            for passed in self.forward()
        ]

    def piece(self, number: int, passed: Responses) -> Tensor:
        """The part of L of pass ``number``; losses of one batch can share a forward pass."""
        log_probs_BT = passed.log_probs_BT()
        if self._surrogate is None or self._held is None:
            return -log_probs_BT.sum() / self._batch.tokens
        held = self._held[number]
        return policy_loss(
            log_probs_BT,
            held.old_log_probs_BT,
            held.advantages_BT,
            passed.mask_BT,
            LossSettings(
                UNIFORM,
                self._surrogate.eps_low,
                self._surrogate.eps_high,
                self._surrogate.dual_clip,
                aggregation="token-mean" if self._surrogate.token_level else "seq-mean",
            ),
            total=self._batch.tokens if self._surrogate.token_level else len(self._batch.rows),
            coefficient=held.coefficient_BT,
        ).loss

    def _hold(
        self, surrogate: Surrogate, advantages: list[float], centre: Sequence[Centre]
    ) -> list[_Held]:
        """Old log-probs, advantages and weights of each pass, at the centre."""
        columns = [
            torch.tensor([[advantages[i]] for i in indices])
            .to(at.log_probs_BT)
            .expand_as(at.mask_BT)
            for indices, at in zip(self._passes, centre, strict=True)
        ]
        held = []
        weights = self._weights(surrogate, columns, centre)
        for at, advantages_BT, weights_BT in zip(centre, columns, weights, strict=True):
            if surrogate.weights.placement == "inside":
                # A weight of 0 would be an infinite shift; exp(-20), the ratio's limit, is near.
                shift_BT = weights_BT.log().clamp(min=math.log(1e-9))
                held.append(_Held(at.log_probs_BT - shift_BT, advantages_BT, None))
            else:
                held.append(_Held(at.log_probs_BT, advantages_BT, weights_BT))
        return held

    def _weights(
        self, surrogate: Surrogate, advantages: Sequence[Tensor], centre: Sequence[Centre]
    ) -> list[Tensor]:
        """The weights [B, T] of each pass, 1 where there is no token.

        All tokens are weighted as one row, so that a mean or a quantile over tokens is that of the
        batch however it is cut.
        """
        masks = [at.mask_BT for at in centre]

        def row(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([part[m] for part, m in zip(parts, masks, strict=True)])[None]

        log_probs_1N = row([at.log_probs_BT for at in centre])
        entropies = [at.entropy_BT for at in centre if at.entropy_BT is not None]
        context = TokenContext(
            old_log_probs=log_probs_1N,
            engine_log_probs=log_probs_1N,
            advantages=row(advantages),
            keys=row([at.keys_BT for at in centre]),
            entropy=row(entropies) if entropies else None,
            eps=(surrogate.eps_low, surrogate.eps_high),
        )
        weights_N = token_weights(log_probs_1N, surrogate.weights, context=context)[0]
        found = [at.log_probs_BT.new_ones(at.mask_BT.shape) for at in centre]
        parts = weights_N.split([int(mask.sum()) for mask in masks])
        for whole, mask, part in zip(found, masks, parts, strict=True):
            whole[mask] = part.to(whole.dtype)
        return found


@dataclass(frozen=True)
class _Held:
    """With uniform weights, old log-probs shifted by log w have the ratio w r: Eq. 13's product.

    Outside the clip the weight is a coefficient of the token's loss instead.
    """

    old_log_probs_BT: Tensor
    advantages_BT: Tensor
    coefficient_BT: Tensor | None
