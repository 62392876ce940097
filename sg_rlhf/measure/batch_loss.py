"""The losses whose sharpness is measured, over a fixed batch, one pass of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sg_rlhf.algo.policy_loss import policy_loss_terms
from sg_rlhf.algo.token_weights import token_weights, weight_sum_and_count
from sg_rlhf.algo.weightings import Uniform, Weighting
from sg_rlhf.measure.checkpoint import PASS_TOKENS, passes, responses
from sg_rlhf.measure.fixed_batch import FixedBatch

UNIFORM = Uniform()


@dataclass(frozen=True)
class Surrogate:
    """The clipped surrogate of a run (see ``policy_loss_terms``); the paper's clip by default."""

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


class BatchLoss:
    """L as ``sg_rlhf.algo.sharpness`` wants it: called, it gives one piece of L per pass.

    ``surrogate`` None: the mean negative log-likelihood of the responses' tokens.

    Otherwise minus the surrogate J of Eq. 13, with the old log-probs those of this model at
    construction: the ratio is 1 at the centre, so that each checkpoint is measured at its own first
    update. **The weights are held** at their values at the centre, as the stop-gradient of Eq. 19
    says: L is then a function of theta' alone whose gradient at theta is the update's. Weights
    recomputed at theta' would move L in ways that its gradient leaves out. The KL term is left out.

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
        on_pass: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._surrogate = surrogate
        self._on_pass = on_pass
        self._passes = list(passes(batch.rows, pass_tokens))
        self._held = None if surrogate is None else self._hold(surrogate, batch.advantages())

    @property
    def n_passes(self) -> int:
        """Forward passes for one value of L."""
        return len(self._passes)

    def __call__(self) -> Iterator[Tensor]:
        for number, indices in enumerate(self._passes):
            log_probs_BT, mask_BT = self._log_probs(indices)
            if self._surrogate is None or self._held is None:
                yield -log_probs_BT.sum() / self._batch.tokens
            else:
                held = self._held[number]
                yield policy_loss_terms(
                    log_probs_BT,
                    held.old_log_probs_BT,
                    held.advantages_BT,
                    mask_BT,
                    UNIFORM,
                    self._surrogate.eps_low,
                    self._surrogate.eps_high,
                    self._surrogate.dual_clip,
                    token_level_loss=self._surrogate.token_level,
                    batch_num_tokens=self._batch.tokens,
                    global_batch_size=len(self._batch.rows),
                    token_coef_BT=held.coefficient_BT,
                ).loss
            self._on_pass()

    def _log_probs(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = [self._batch.rows[i] for i in indices]
        found = responses(self._model, rows, self._batch.temperature)
        return found.log_probs_BT(), found.mask_BT

    @torch.no_grad()
    def _hold(self, surrogate: Surrogate, advantages: list[float]) -> list[_Held]:
        """Old log-probs, advantages and weights of each pass, at the centre."""
        found = [self._log_probs(indices) for indices in self._passes]
        columns = [
            torch.tensor([[advantages[i]] for i in indices]).to(log_probs_BT).expand_as(mask_BT)
            for indices, (log_probs_BT, mask_BT) in zip(self._passes, found, strict=True)
        ]
        cfg = surrogate.weights
        # Used with normalize=batch_mean alone: the mean is that of the whole batch.
        sums = [weight_sum_and_count(log_probs, cfg, mask) for log_probs, mask in found]
        total, count = torch.stack(sums).sum(0)
        return [
            _hold_weights(
                log_probs_BT,
                advantages_BT,
                token_weights(log_probs_BT, cfg, mask_BT, mean_weight=float(total / count)),
                inside=cfg.placement == "inside",
            )
            for (log_probs_BT, mask_BT), advantages_BT in zip(found, columns, strict=True)
        ]


@dataclass(frozen=True)
class _Held:
    """With uniform weights, old log-probs shifted by log w have the ratio w r: Eq. 13's product.

    Outside the clip the weight is a coefficient of the token's loss instead.
    """

    old_log_probs_BT: Tensor
    advantages_BT: Tensor
    coefficient_BT: Tensor | None


def _hold_weights(
    log_probs_BT: Tensor, advantages_BT: Tensor, weights_BT: Tensor, *, inside: bool
) -> _Held:
    if inside:
        # A weight of 0 would be a shift by infinity; the ratio's own limit, exp(-20), is 0 enough.
        shift_BT = weights_BT.log().clamp(min=math.log(1e-9))
        return _Held(log_probs_BT - shift_BT, advantages_BT, None)
    return _Held(log_probs_BT, advantages_BT, weights_BT)
