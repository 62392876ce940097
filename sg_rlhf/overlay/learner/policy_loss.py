"""The loss of one micro-batch: a pure function of the batch, the policy's output and settings.

:func:`micro_batch_loss` computes the policy loss, the KL to the reference and to the engine, and
the entropy bonus. The policy loss is :func:`sg_rlhf.algo.policy_loss.policy_loss`, or upstream's
``PolicyLoss`` for upstream's own loss types, with the same statistics.
"""

from __future__ import annotations

import dataclasses
import warnings
from argparse import Namespace
from dataclasses import dataclass

import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.analysis.gradient_dead_zones import DeadZoneWarning
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics, mismatch_statistics
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.lopti import in_pass
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.token_weights import token_weights, weight_shift
from sg_rlhf.algo.weightings import TokenContext, Uniform, Weighting, make_weighting, token_keys
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES, PROMPT_MEAN
from sg_rlhf.config.weighting_resolution import built_objective, built_weighting
from sg_rlhf.overlay.learner.replay_buffer import Denominators


@dataclass(frozen=True)
class LossBatch:
    """What the loss reads of a micro-batch: B responses of T tokens, padded on the right.

    All tensors are [B, T], on the rank's device and without a gradient. Log-probs are finite at
    masked positions.

    Attributes:
        mask_BT: not 0 at response tokens.
        old_log_probs_BT: under the policy that sampled; None: the current ones.
        reference_log_probs_BT: of the reference model; None without a KL.
        engine_log_probs_BT: of the rollout engine; None where it gave none.
        keys_BT: int64, of :func:`~sg_rlhf.algo.weightings.token_keys`; None where the weighting
            reads none.
    """

    mask_BT: Tensor
    advantages_BT: Tensor
    old_log_probs_BT: Tensor | None = None
    reference_log_probs_BT: Tensor | None = None
    engine_log_probs_BT: Tensor | None = None
    keys_BT: Tensor | None = None
    denominators: Denominators = dataclasses.field(default_factory=Denominators)


@dataclass(frozen=True)
class PolicyOutput:
    """The policy's forward pass over a micro-batch, with gradients.

    Attributes:
        entropy_BT: [B, T], at each position; None where nothing reads it.
        aux_loss: scalar, the router's loss of a mixture of experts; None without one.
    """

    log_probs_BT: Tensor
    entropy_BT: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True)
class RolloutConstants:
    """What all micro-batches of a rollout share; ``lopti_pass`` is None without passes."""

    kl_coef: float = 0.0
    mean_weight: float | None = None
    entropy_threshold: float | None = None
    surprisal_cuts: Tensor | None = None
    lopti_pass: str | None = None


@dataclass(frozen=True)
class UpdateLossSettings:
    """The settings of a run's loss.

    Attributes:
        policy: of the policy loss. With ``stock`` its statistics alone are used, with w = 1.
        stock: upstream's ``PolicyLoss`` for upstream's own loss types, else None.
        kl_estimator: of the KL to the reference; None without a KL in the loss.
        kl_unbiased: give the KL its unbiased gradient.
        kl_weighting: for a weighted KL with ``stock``, which has no weights of its own.
        kl_to_engine: coefficient of the KL to the engine, or 0.
        entropy_coef: of the entropy bonus; None does not compute the entropy.
    """

    policy: LossSettings
    correction: RolloutCorrectionConfig
    stock: PolicyLoss | None = None
    kl_estimator: str | None = None
    kl_unbiased: bool = False
    kl_weighting: Weighting = dataclasses.field(default_factory=Uniform)
    kl_to_engine: float = 0.0
    entropy_coef: float | None = None
    aux_loss_coef: float = 0.0
    lopti_threshold: float = 0.5

    @property
    def weighting(self) -> Weighting:
        """The token weighting of the policy loss."""
        return make_weighting(self.policy.weighting)

    @property
    def needs_entropy(self) -> bool:
        """Whether the policy must compute the entropy of each token."""
        return self.entropy_coef is not None or "entropy" in self.weighting.reads


@dataclass(frozen=True)
class MicroBatchLoss:
    """The result of :func:`micro_batch_loss`.

    Attributes:
        policy_loss: the policy loss alone, detached. It is not finite if a log-prob, old log-prob
            or advantage of a response token is not.
        terms: the terms of the loss by metric name, scalars without a gradient and without their
            coefficients.
        metrics: means over this micro-batch's tokens by metric name, scalars without a gradient.
        statistics: sums over the tokens that take part in this pass.
        mismatch: sums over all response tokens; None without the engine's log-probs.
        log_probs_BT: [B, T], detached.
        old_log_probs_BT: [B, T]: the batch's, or ``log_probs_BT`` where it has none.
        entropy_BT: [B, T], detached; None where it was not computed.
    """

    loss: Tensor
    policy_loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]
    statistics: TokenStatistics
    mismatch: TokenStatistics | None
    log_probs_BT: Tensor
    old_log_probs_BT: Tensor
    entropy_BT: Tensor | None


def loss_settings(args: Namespace, upstream_loss: PolicyLoss) -> UpdateLossSettings:
    """The settings of a run; ValueError for a weight that cannot vary."""
    # A run prints its dead zones when it starts.
    warnings.filterwarnings("ignore", category=DeadZoneWarning)
    kind = args.actor.policy_loss_type
    is_ours = kind in POLICY_LOSS_TYPES
    weighting = built_weighting(args.sg.weighting)
    mean = "token-mean" if upstream_loss.token_level_loss else "seq-mean"
    policy = LossSettings(
        weighting if is_ours else Uniform(),
        upstream_loss.clip_eps_low,
        upstream_loss.clip_eps_high,
        upstream_loss.dual_clip,
        built_objective(kind, args.sg.objective) if is_ours else "ppo",
        PROMPT_MEAN if args.actor.loss_agg_mode == PROMPT_MEAN else mean,
    )
    correction = RolloutCorrectionConfig(
        level=upstream_loss.is_correction_level,
        mode=upstream_loss.is_correction_mode,
        gating=upstream_loss.is_correction_gating,
        threshold=tuple(upstream_loss.is_correction_threshold),
    )
    kl = args.algo.kl
    return UpdateLossSettings(
        policy,
        correction,
        None if is_ours else upstream_loss,
        kl.estimator if kl.use_loss else None,
        kl.unbiased_gradient,
        weighting,
        args.sg.kl_to_engine,
        args.actor.entropy_coef,
        args.actor.aux_loss_coef,
        args.sg.lopti_threshold,
    )


def loss_batch(
    experience: Experience, weighting: Weighting, denominators: Denominators
) -> LossBatch:
    """The one place that reads upstream's ``Experience`` for the loss."""

    def filled(values: Tensor | None) -> Tensor | None:
        # A NaN at a masked position survives a product with the mask.
        return None if values is None else values.masked_fill(experience.action_mask == 0, 0.0)

    keys = None
    if "keys" in weighting.reads:
        keys = token_keys(experience.sequences, experience.attention_mask)
    return LossBatch(
        mask_BT=experience.action_mask,
        advantages_BT=experience.advantages,
        old_log_probs_BT=filled(experience.action_log_probs),
        reference_log_probs_BT=filled(experience.base_action_log_probs),
        engine_log_probs_BT=filled(experience.rollout_log_probs),
        keys_BT=keys,
        denominators=denominators,
    )


def weighting_context(
    batch: LossBatch, rollout: RolloutConstants, eps: tuple[float, float], entropy: Tensor | None
) -> TokenContext:
    """The weighting's inputs other than p."""
    return TokenContext(
        old_log_probs=batch.old_log_probs_BT,
        advantages=batch.advantages_BT,
        entropy=None if entropy is None else entropy.detach(),
        keys=batch.keys_BT,
        engine_log_probs=batch.engine_log_probs_BT,
        eps=eps,
        entropy_threshold=rollout.entropy_threshold,
        surprisal_cuts=rollout.surprisal_cuts,
        mean_weight=rollout.mean_weight,
    )


def micro_batch_loss(
    batch: LossBatch,
    policy: PolicyOutput,
    settings: UpdateLossSettings,
    rollout: RolloutConstants,
    aux_loss_scale: float = 1.0,
) -> MicroBatchLoss:
    """loss = policy loss + kl_coef * KL + kl_to_engine * KL - entropy_coef * entropy + aux loss.

    Each term is this micro-batch's share of the optimizer step's mean, times ranks and
    accumulation, by which DeepSpeed divides. ``actor.loss_agg_mode`` chooses the mean of the policy
    loss. KL and entropy have the mean over tokens, as upstream's, but with ``prompt-mean`` also
    that over prompts, as Eq. 5 has the KL. Nothing here waits for the device.
    """
    log_probs_BT, denominators = policy.log_probs_BT, batch.denominators
    if batch.old_log_probs_BT is None:
        batch = dataclasses.replace(batch, old_log_probs_BT=log_probs_BT.detach())
    old_BT = batch.old_log_probs_BT
    assert old_BT is not None
    eps = (settings.policy.eps_low, settings.policy.eps_high)
    context = weighting_context(batch, rollout, eps, policy.entropy_BT)
    active_BT = None
    if rollout.lopti_pass is not None:
        active_BT = in_pass(old_BT, settings.lopti_threshold, rollout.lopti_pass)
    loss, weights_BT, statistics, metrics = _policy_loss(
        batch, log_probs_BT, old_BT, settings, context, active_BT
    )
    terms = {"policy_loss": loss.detach()}

    def kl(reference_BT: Tensor | None, estimator: str, unbiased: bool) -> Tensor:
        assert reference_BT is not None
        weights = weights_BT
        if weights is None and estimator in KL_ESTIMATORS:
            weights = token_weights(log_probs_BT, settings.kl_weighting)
        kl_BT = kl_estimate(
            log_probs_BT,
            reference_BT,
            weights,
            estimator,
            old_log_probs=old_BT,
            unbiased_gradient=unbiased,
        )
        if active_BT is not None:
            kl_BT = kl_BT.masked_fill(~active_BT, 0.0)
        return denominators.mean(kl_BT, batch.mask_BT)

    if settings.kl_estimator is not None:
        reference_BT = batch.reference_log_probs_BT
        if reference_BT is None or rollout.kl_coef <= 0:
            kl_loss = difference = torch.zeros_like(loss.detach())
        else:
            kl_loss = kl(reference_BT, settings.kl_estimator, settings.kl_unbiased)
            difference_BT = log_probs_BT.detach().float() - reference_BT.float()
            difference = aggregate(difference_BT, batch.mask_BT)
        terms["kl"] = kl_loss.detach()
        metrics["logprobs_diff"] = difference
        loss = loss + kl_loss * rollout.kl_coef
    if settings.kl_to_engine > 0:
        engine_kl = kl(batch.engine_log_probs_BT, "k3", False)
        terms["engine_kl"] = engine_kl.detach()
        loss = loss + engine_kl * settings.kl_to_engine
    if policy.aux_loss is not None:
        loss = loss + policy.aux_loss * settings.aux_loss_coef * aux_loss_scale
    if settings.entropy_coef is not None:
        assert policy.entropy_BT is not None
        entropy = denominators.mean(policy.entropy_BT, batch.mask_BT)
        terms["entropy_loss"] = entropy.detach()
        if settings.entropy_coef != 0:
            loss = loss - entropy * settings.entropy_coef
    mismatch = None
    if batch.engine_log_probs_BT is not None:
        mismatch, in_this_pass = _mismatch(batch, old_BT, settings.weighting, context, active_BT)
        statistics = statistics + in_this_pass
    return MicroBatchLoss(
        loss=loss,
        policy_loss=terms["policy_loss"],
        terms=terms,
        metrics=metrics,
        statistics=statistics,
        mismatch=mismatch,
        log_probs_BT=log_probs_BT.detach(),
        old_log_probs_BT=old_BT,
        entropy_BT=context.entropy,
    )


def _policy_loss(
    batch: LossBatch,
    log_probs_BT: Tensor,
    old_BT: Tensor,
    settings: UpdateLossSettings,
    context: TokenContext,
    active_BT: Tensor | None,
) -> tuple[Tensor, Tensor | None, TokenStatistics, dict[str, Tensor]]:
    """The policy loss, its token weights (None with a stock loss), statistics and metrics."""
    denominators, stock = batch.denominators, settings.stock
    coefficient_BT: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    if stock is None:
        coefficient_BT, metrics = rollout_correction(
            old_BT, batch.engine_log_probs_BT, batch.mask_BT, settings.correction
        )
    aggregation = settings.policy.aggregation
    # With a stock loss only its statistics are wanted, so that runs can be compared.
    with torch.set_grad_enabled(stock is None and torch.is_grad_enabled()):
        ours = policy_loss(
            log_probs_BT,
            old_BT,
            batch.advantages_BT,
            batch.mask_BT,
            settings.policy,
            total=denominators.total(aggregation),
            prompt_tokens=denominators.prompt_tokens_B,
            coefficient=coefficient_BT,
            active=active_BT,
            context=context,
        )
    if stock is None:
        metrics["ppo_clip_ratio"] = ours.statistics.mean("clip_ratio")
        metrics["ppo_kl"] = ours.statistics.mean("ppo_kl")
        return ours.loss * denominators.ranks, ours.weights_BT, ours.statistics, metrics
    # Upstream's names and order of arguments appear here alone.
    loss, clip_ratio, ppo_kl, engine_kl, filtered = stock(
        log_probs_BT,
        old_BT,
        batch.advantages_BT,
        action_mask=batch.mask_BT,
        rollout_log_probs=batch.engine_log_probs_BT,
        dp_size=denominators.ranks,
        batch_num_tokens=denominators.tokens,
        global_batch_size=denominators.responses,
    )
    metrics = {"ppo_clip_ratio": clip_ratio.detach(), "ppo_kl": ppo_kl.detach()}
    if engine_kl is not None:
        metrics |= {"vllm_kl": engine_kl.detach(), "is_filter_ratio": filtered.detach()}
    return loss, None, ours.statistics, metrics


@torch.no_grad()
def _mismatch(
    batch: LossBatch,
    old_BT: Tensor,
    weighting: Weighting,
    context: TokenContext,
    active_BT: Tensor | None,
) -> tuple[TokenStatistics, TokenStatistics]:
    """Statistics of the mismatch over all response tokens, and over those of this pass."""
    engine_BT = batch.engine_log_probs_BT
    assert engine_BT is not None
    shift_BT = weight_shift(old_BT, engine_BT, weighting, batch.mask_BT, context)
    whole = mismatch_statistics(old_BT, engine_BT, batch.mask_BT, shift_BT)
    if active_BT is None:
        return whole, whole
    counted_BT = batch.mask_BT.bool() & active_BT
    return whole, mismatch_statistics(old_BT, engine_BT, counted_BT, shift_BT)
