"""The policy loss and the KL of an update: the pure functions of :mod:`sg_rlhf.algo` as modules.

:class:`PolicyLossWithStatistics` has the signature of upstream's ``PolicyLoss``. For upstream's own
loss types it calls that module and adds statistics; for ours it calls
:func:`sg_rlhf.algo.policy_loss.policy_loss`. Either way it refuses a loss that is not finite
before backward, so that no optimizer step is taken on it.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sg_rlhf.algo.analysis.gradient_dead_zones import DeadZoneWarning
from sg_rlhf.algo.analysis.token_statistics import (
    TokenStatistics,
    kl_statistics,
    mismatch_statistics,
)
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.lopti import in_pass
from sg_rlhf.algo.nonfinite import rows_not_finite
from sg_rlhf.algo.objectives import Objective
from sg_rlhf.algo.objectives.ppo import WeightedPPO
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.token_weights import token_weights, weight_shift
from sg_rlhf.algo.weightings import TokenContext, Uniform, Weighting, token_keys
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES, PROMPT_MEAN
from sg_rlhf.config.weighting_resolution import built_objective, built_weighting
from sg_rlhf.overlay.learner.replay_buffer import Denominators
from sg_rlhf.overlay.reporting.errors import NonFiniteError


def weighting_of(args: Any) -> Weighting:
    """The token weighting of ``args.sg``.

    Raises:
        ValueError: a weight that cannot vary.
    """
    return built_weighting(args.sg.weighting)


def token_context(experience: Any, weighting: Weighting) -> TokenContext:
    """The inputs of the weighting for a batch, other than the current log-probs.

    Args:
        experience: of B samples.
        weighting: the recipe's.
    """
    keys = None
    if "keys" in weighting.reads:
        keys = token_keys(experience.sequences, experience.attention_mask)
    return TokenContext(
        old_log_probs=experience.action_log_probs,
        advantages=experience.advantages,
        keys=keys,
        engine_log_probs=experience.rollout_log_probs,
    )


def aggregation_of(args: Any, token_level: bool) -> str:
    """The mean of the policy loss.

    Args:
        args: upstream's nested namespace with ``sg``.
        token_level: whether upstream takes the mean over tokens.
    """
    if args.actor.loss_agg_mode == PROMPT_MEAN:
        return PROMPT_MEAN
    return "token-mean" if token_level else "seq-mean"


class PolicyLossWithStatistics(nn.Module):
    """Upstream's ``PolicyLoss``, or ours by name, with token statistics for every call.

    Args:
        upstream_loss: the module that upstream's trainer built from the same flags.
        args: upstream's nested namespace with ``sg``.

    Attributes:
        weights_BT: token weights of the latest call, for the weighted KL; None with a stock loss.
        active_BT: tokens of the latest call that take part in this pass of ``sg.update=lopti``;
            None where all do.
        objective: the recipe's; PPO with a stock loss.
        weighting: the recipe's; w = 1 with a stock loss.
        log_probs_BT: the current log-probs of the latest call, detached.
        old_log_probs_BT: old log-probs of the latest call: the current ones where it got none.
        mismatch: sum of abs(old - engine's log-prob) and number of tokens, float64 [2], since the
            trainer set it to zeros.
        finished_at: ``time.perf_counter()`` at the end of the latest call. The call has waited for
            the device by then, to see whether the loss is finite.

    The trainer sets:
        mean_weight: the rollout's mean weight for ``normalize=batch_mean``.
        context: the weighting's inputs other than p (``sg_rlhf.algo.weightings``).
        prompts: of the B samples, for the message of an error.
        step: number of the optimizer step, for the message of an error.
        lopti_pass: the present pass of ``sg.update=lopti``, or None.
        on_nonfinite: called for a loss that is not finite, instead of raising ``NonFiniteError``.
            Gets a message, and for each sample whether one of its numbers is not finite.
    """

    def __init__(self, upstream_loss: Any, args: Any) -> None:
        super().__init__()
        # A run prints its dead zones when it starts.
        warnings.filterwarnings("ignore", category=DeadZoneWarning)
        self.upstream_loss = upstream_loss
        self.is_ours = args.actor.policy_loss_type in POLICY_LOSS_TYPES
        self.objective: Objective = WeightedPPO()
        self.weighting: Weighting = Uniform()
        if self.is_ours:
            self.objective = built_objective(args.actor.policy_loss_type, args.sg.objective)
            self.weighting = weighting_of(args)
        self.settings = LossSettings(
            self.weighting,
            upstream_loss.clip_eps_low,
            upstream_loss.clip_eps_high,
            upstream_loss.dual_clip,
            self.objective,
            aggregation_of(args, upstream_loss.token_level_loss),
        )
        self.correction = RolloutCorrectionConfig(
            level=upstream_loss.is_correction_level,
            mode=upstream_loss.is_correction_mode,
            gating=upstream_loss.is_correction_gating,
            threshold=tuple(upstream_loss.is_correction_threshold),
        )
        self.weights_BT: torch.Tensor | None = None
        self.active_BT: torch.Tensor | None = None
        self.mean_weight: float | None = None
        self.context = TokenContext()
        self.lopti_pass: str | None = None
        self.mismatch = torch.zeros(2, dtype=torch.float64)
        self.finished_at = 0.0
        self.log_probs_BT: torch.Tensor | None = None
        self.old_log_probs_BT: torch.Tensor | None = None
        self.prompts: list[str] = []
        self.step = 0
        self.on_nonfinite: Callable[[str, list[bool]], None] | None = None
        self._lopti_threshold = args.sg.lopti_threshold
        self._mask_BT: torch.Tensor | None = None
        self._statistics: TokenStatistics | None = None

    def pop_statistics(self) -> TokenStatistics:
        """Token statistics of all calls since the last call of this method."""
        statistics, self._statistics = self._statistics, None
        assert statistics is not None
        return statistics

    def mask_kl_to_pass(self, kl_BT: torch.Tensor) -> torch.Tensor:
        """Mask the KL of tokens that are not in this pass of ``sg.update=lopti``; counts it.

        Args:
            kl_BT: [B, T], of the latest call's tokens.
        """
        mask_BT = self._mask_BT
        assert mask_BT is not None, "upstream computes the policy loss before the KL"
        if self.active_BT is not None:
            kl_BT = kl_BT.masked_fill(~self.active_BT, 0.0)
            mask_BT = mask_BT.bool() & self.active_BT
        self._add(kl_statistics(kl_BT, mask_BT))
        return kl_BT

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None = None,
        denominators: Denominators | None = None,
    ) -> tuple[Any, ...]:
        """The policy loss of a micro-batch, with upstream's signature.

        Args:
            log_probs: [B, T], of the sampled tokens under the policy, with a gradient.
            old_log_probs: [B, T], under the policy that sampled; None: the current ones, detached.
            advantages: [B, T].
            action_mask: [B, T], not 0 at response tokens.
            rollout_log_probs: [B, T], of the rollout engine; None where it gave none.
            denominators: of the optimizer step; None for those of this batch.

        Returns:
            (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio), scalars; the last two are None
            without an importance correction.

        Raises:
            NonFiniteError: the loss is not finite, and ``on_nonfinite`` is not set.
        """
        loss, denominators = self.upstream_loss, denominators or Denominators()
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            self.context = dataclasses.replace(self.context, old_log_probs=old_log_probs)
        self.log_probs_BT, self.old_log_probs_BT = log_probs.detach(), old_log_probs
        coefficient: torch.Tensor | None = None
        correction: dict[str, torch.Tensor] = {}
        if self.is_ours:
            coefficient, correction = rollout_correction(
                old_log_probs, rollout_log_probs, action_mask, self.correction
            )
        self.active_BT = None
        if self.lopti_pass:
            self.active_BT = in_pass(old_log_probs, self._lopti_threshold, self.lopti_pass)
        # With a stock loss only its statistics are wanted, so that runs can be compared.
        with torch.set_grad_enabled(self.is_ours and torch.is_grad_enabled()):
            output = policy_loss(
                log_probs,
                old_log_probs,
                advantages,
                action_mask,
                self.settings,
                total=denominators.total(self.settings.aggregation),
                prompt_tokens=denominators.prompt_tokens_B,
                coefficient=coefficient,
                active=self.active_BT,
                context=dataclasses.replace(self.context, mean_weight=self.mean_weight),
            )
        self._add(output.statistics)
        if rollout_log_probs is not None:
            self._add(self._mismatch(old_log_probs, rollout_log_probs, advantages, action_mask))
        self._mask_BT = action_mask
        if self.is_ours:
            self.weights_BT = output.weights_BT
            result: tuple[Any, ...] = (
                output.loss * denominators.ranks,
                output.statistics.mean("clip_ratio"),
                output.statistics.mean("ppo_kl"),
                correction.get("vllm_kl"),
                correction.get("is_filter_ratio"),
            )
        else:
            result = loss(
                log_probs,
                old_log_probs,
                advantages,
                action_mask=action_mask,
                rollout_log_probs=rollout_log_probs,
                dp_size=denominators.ranks,
                batch_num_tokens=denominators.tokens,
                global_batch_size=denominators.responses,
            )
        # A log-prob that is not finite makes the loss so too: its ratio to itself is NaN.
        if not bool(torch.isfinite(result[0])):
            message = (
                f"policy loss {float(result[0].detach())} before optimizer step {self.step}: "
                f"{_describe(log_probs, old_log_probs, advantages, action_mask)}"
                f"{self._first_bad(log_probs, action_mask)}; nothing was trained on it"
            )
            if self.on_nonfinite is None:
                raise NonFiniteError(message)
            tensors = (log_probs, old_log_probs, advantages)
            bad = [rows_not_finite(values.detach(), action_mask) for values in tensors]
            self.on_nonfinite(message, torch.stack(bad).any(0).tolist())
        self.finished_at = time.perf_counter()
        return result

    @torch.no_grad()
    def _mismatch(
        self,
        old_log_probs_BT: torch.Tensor,
        engine_BT: torch.Tensor,
        advantages_BT: torch.Tensor,
        mask_BT: torch.Tensor,
    ) -> TokenStatistics:
        eps = (self.upstream_loss.clip_eps_low, self.upstream_loss.clip_eps_high)
        context = dataclasses.replace(
            self.context, old_log_probs=old_log_probs_BT, advantages=advantages_BT, eps=eps
        )
        shift_BT = weight_shift(old_log_probs_BT, engine_BT, self.weighting, mask_BT, context)
        valid_BT = mask_BT.bool()  # also those that are not in this pass
        difference_BT = (old_log_probs_BT - engine_BT).double().masked_fill(~valid_BT, 0.0)
        self.mismatch = self.mismatch.to(valid_BT.device) + torch.stack(
            [difference_BT.abs().sum(), valid_BT.sum().double()]
        )
        if self.active_BT is not None:
            mask_BT = mask_BT.bool() & self.active_BT
        return mismatch_statistics(old_log_probs_BT, engine_BT, mask_BT, shift_BT)

    def _first_bad(self, log_probs: torch.Tensor, mask: torch.Tensor) -> str:
        """The prompt of the first sample with a log-prob that is not finite, if any."""
        bad = (~torch.isfinite(log_probs) & mask.bool()).any(dim=1).tolist()
        prompts = [prompt for prompt, is_bad in zip(self.prompts, bad, strict=False) if is_bad]
        return f" (prompt: {prompts[0][-200:]!r})" if prompts else ""

    def _add(self, statistics: TokenStatistics) -> None:
        self._statistics = statistics if self._statistics is None else self._statistics + statistics


def kl_dispatcher(args: Any, loss: PolicyLossWithStatistics | None) -> Callable[..., torch.Tensor]:
    """A function with the signature of upstream's ``compute_approx_kl``, with our estimators too.

    Args:
        args: upstream's nested namespace with ``sg``.
        loss: the policy loss whose weights a weighted KL shares; None where there is none (KL in
            the reward), or with a stock loss: then the weights come from the log-probs.
    """
    from openrlhf.models.utils import compute_approx_kl

    def in_this_pass(kl_BT: torch.Tensor) -> torch.Tensor:
        return kl_BT if loss is None else loss.mask_kl_to_pass(kl_BT)

    def dispatch(
        log_probs: torch.Tensor,
        log_probs_base: torch.Tensor,
        log_probs_old: torch.Tensor | None = None,
        kl_estimator: str = "k1",
        unbiased_gradient: bool = False,
    ) -> torch.Tensor:
        if log_probs_old is None and loss is not None:
            log_probs_old = loss.old_log_probs_BT
        if kl_estimator not in KL_ESTIMATORS:
            stock: torch.Tensor = compute_approx_kl(
                log_probs, log_probs_base, log_probs_old, kl_estimator, unbiased_gradient
            )
            return in_this_pass(stock)
        weights = loss.weights_BT if loss is not None else None
        if weights is None:
            weights = token_weights(log_probs, weighting_of(args))
        weighted = kl_estimate(
            log_probs,
            log_probs_base,
            weights,
            kl_estimator,
            old_log_probs=log_probs_old,
            unbiased_gradient=unbiased_gradient,
        )
        return in_this_pass(weighted)

    return dispatch


def _describe(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> str:
    valid = mask.bool()
    if not bool(valid.any()):
        return "no token of the optimizer step takes part in it"
    counts = {
        name: int((~torch.isfinite(x[valid])).sum())
        for name, x in (
            ("log_probs", log_probs),
            ("old log_probs", old_log_probs),
            ("advantages", advantages),
        )
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return (
        f"of {int(valid.sum())} tokens not finite are {listed or 'none (an overflow in the loss)'}"
    )
