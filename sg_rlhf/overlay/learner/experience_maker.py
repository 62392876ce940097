"""The controller's scoring of a rollout. The forward passes run on the ranks of each model."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import ray
import torch
from openrlhf.models.utils import masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController
from openrlhf.trainer.ray.launcher import RayActorGroup
from ray import ObjectRef

from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS
from sg_rlhf.config.weighting_resolution import built_weighting
from sg_rlhf.overlay.learner import (
    advantages,
    micro_batches,
    nonfinite,
    old_log_probs,
    overlapped_reference,
)
from sg_rlhf.overlay.reporting.timing import PhaseTimer


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with all that the update reads.

    Attributes:
        micro_batches: all of the first rank, all of the second, and so on.
        masked_rows: rows of ``nonfinite.jsonl`` about samples that were masked.
        pending_reference: log-probs computed during the update; None if computed before.
    """

    micro_batches: list[Experience]
    masked_rows: list[dict[str, Any]]
    empty_responses: int
    idle_fraction: float | None
    pending_reference: overlapped_reference.PendingLogProbs | None


class ExperienceMaker:
    """Turns a rollout's samples into experience: log-probs, KL, rewards, advantages.

    ``reference`` is None without a KL, ``reward`` where the samples have their rewards.
    """

    def __init__(
        self,
        args: Namespace,
        policy: RayActorGroup,
        reference: RayActorGroup | None,
        reward: RayActorGroup | None,
        kl_controller: AdaptiveKLController | FixedKLController,
        pad_token_id: int,
        clock: PhaseTimer,
    ) -> None:
        self.args, self._clock = args, clock
        self._policy, self._reference, self._reward = policy, reference, reward
        self._kl_controller, self._pad_token_id = kl_controller, pad_token_id
        self._update_computes_old = old_log_probs.rule_of(args).of != "all"
        self._overlaps_reference = reference is not None and overlapped_reference.can_overlap(args)

    def score(self, samples: list[Experience], rollout: int) -> ScoredRollout:
        """Score a rollout and cut it into the micro-batches that the ranks train.

        ``rollout``: rollouts trained before; seeds the order of the samples. Raises NonFiniteError.
        """
        with self._clock.section("make_experience"):
            for i, sample in enumerate(samples):
                sample.index = [i]
            batches = micro_batches.scoring_micro_batches(samples, self.args)
            scored = micro_batches.concat(samples, batches, self._pad_token_id)
            self.add_scores(scored)
            # Before samples are masked: a masked sample has no tokens, but a valid reward.
            has_tokens = [e.action_mask.bool().any(dim=-1) for e in scored]
            masked_rows = nonfinite.check_samples(
                scored, self.args.rollout.n_samples_per_prompt, self.args.sg.on_nonfinite
            )
            advantages.add_advantages(scored, has_tokens, self.args, self._kl_controller.value)
            trained = micro_batches.training_micro_batches(
                scored, self.args, rollout, self._pad_token_id
            )
            idle_fraction = pending = None
            if micro_batches.balances_micro_batches(self.args):
                idle_fraction = micro_batches.dp_idle_fraction(trained, self.args)
            if self._reference is not None and self._overlaps_reference:
                pending = overlapped_reference.submit(self._reference, trained, self.args)
            for experience in trained:
                experience.info[micro_batches.SAMPLE_INDEX] = torch.tensor(experience.index)
            empty_responses = sum(int((~rows).sum()) for rows in has_tokens)
            return ScoredRollout(trained, masked_rows, empty_responses, idle_fraction, pending)

    @torch.no_grad()
    def add_scores(self, samples_list: list[Experience]) -> None:
        """Run the models' forward passes; add log-probs, rewards and KL to the micro-batches.

        Skips the policy's pass if the update computes the old log-probs, and the reference's if it
        overlaps the update.
        """
        train = self.args.train
        has_rewards = samples_list[0].rewards is not None
        if not has_rewards and self._reward is None:
            raise ValueError("reward_model_group is required when rewards are not precomputed")
        with_actor_or_ref = train.colocate_all or train.colocate_actor_ref
        inputs = micro_batches.forward_inputs(samples_list)
        rewards: list[ObjectRef] | None = None
        policy: list[ObjectRef] | None = None
        reference: list[ObjectRef] | None = None
        if not has_rewards:
            rewards = self._start_pass(
                "reward_model",
                self._reward,
                train.colocate_all,
                sequences=inputs["sequences"],
                attention_mask=inputs["attention_mask"],
                pad_sequence=[True] * len(samples_list),
            )
        if not self._update_computes_old:
            policy = self._start_pass("old_log_probs", self._policy, with_actor_or_ref, **inputs)
        if self._reference is not None and not self._overlaps_reference:
            reference = self._start_pass(
                "reference_log_probs", self._reference, with_actor_or_ref, **inputs
            )

        policy_results = self._results("old_log_probs", policy, samples_list)
        reference_results = self._results("reference_log_probs", reference, samples_list)
        reward_results = self._results("reward_model", rewards, samples_list)
        for sample, log_probs_BT, reference_BT, rewards_B in zip(
            samples_list, policy_results, reference_results, reward_results, strict=True
        ):
            if rewards_B is not None:
                sample.rewards = sample.info["reward"] = rewards_B
            self._add_log_probs(sample, log_probs_BT, reference_BT)

    def _start_pass(
        self, name: str, group: RayActorGroup, wait: bool, **inputs: list[Any]
    ) -> list[ObjectRef]:
        """Start a forward pass on all ranks; ``wait`` if it shares GPUs with the next one."""
        with self._clock.section(name):
            references: list[ObjectRef] = group.async_run_method_batch(
                method_name="forward", **inputs
            )
            if wait:
                ray.get(references)
                ray.get(group.async_run_method(method_name="empty_cache"))
        return references

    def _results(
        self, name: str, references: list[ObjectRef] | None, samples: list[Experience]
    ) -> list[torch.Tensor | None]:
        """Results of a pass per micro-batch, zero outside the response; Nones for no pass."""
        if references is None:
            return [None] * len(samples)
        with self._clock.section(name):
            per_rank = ray.get(references)
        results = list(itertools.chain.from_iterable(per_rank))
        # Later products with the mask would keep a NaN.
        return [
            values.masked_fill(sample.action_mask == 0, 0.0)
            if values.shape == sample.action_mask.shape
            else values
            for values, sample in zip(results, samples, strict=True)
        ]

    def _add_log_probs(
        self,
        sample: Experience,
        log_probs_BT: torch.Tensor | None,
        reference_BT: torch.Tensor | None,
    ) -> None:
        """Add log-probs and the KL in the reward; zero if the KL is part of the loss."""
        kl_settings = self.args.algo.kl
        mask_BT = sample.action_mask
        if reference_BT is not None and not kl_settings.use_loss:
            assert log_probs_BT is not None
            weights_BT = None
            if kl_settings.estimator in KL_ESTIMATORS:
                weighting = built_weighting(self.args.sg.weighting)
                weights_BT = token_weights(log_probs_BT, weighting)
            kl_BT = kl_estimate(log_probs_BT, reference_BT, weights_BT, kl_settings.estimator)
            difference_BT = log_probs_BT.float() - reference_BT.float()
        else:
            kl_BT = torch.zeros(mask_BT.shape)
            if log_probs_BT is not None:
                kl_BT = torch.zeros_like(log_probs_BT, device="cpu")
            difference_BT = kl_BT
        has_tokens_B = mask_BT.bool().any(dim=-1)
        for key, values_BT in (("kl", kl_BT), ("logprobs_diff", difference_BT)):
            mean_B = masked_mean(values_BT, mask_BT, dim=-1)  # NaN without tokens
            sample.info[key] = torch.where(has_tokens_B, mean_B, 0.0)
        sample.kl = kl_BT
        sample.action_log_probs = log_probs_BT
        sample.base_action_log_probs = reference_BT if kl_settings.use_loss else None
