"""The controller's scoring of a rollout. The forward passes run on the ranks of each model."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import openrlhf.trainer.ppo_utils.experience_maker as upstream
import ray
import torch
from openrlhf.models.utils import compute_reward, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties
from openrlhf.trainer.ray.launcher import RayActorGroup
from ray import ObjectRef

from sg_rlhf.algo.advantages import (
    COMPARING,
    compared_rewards,
    counted_std,
    equal_rewards,
    level_equal,
    population_std_correction,
)
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS
from sg_rlhf.config.weighting_resolution import built_weighting
from sg_rlhf.overlay.learner import (
    micro_batches,
    nonfinite,
    old_log_probs,
    overlapped_reference,
    sample_mask,
)
from sg_rlhf.overlay.reporting.timing import PhaseTimer


class SGExperienceMaker(upstream.RemoteExperienceMaker):  # type: ignore[misc]
    """Turns a rollout's samples into experience: log-probs, KL, rewards, advantages.

    Attributes:
        clock: of the controller.
        rollout: index of the rollout; with the seed it decides which samples an optimizer step has.
        idle_fraction: of the latest update, see
            :func:`sg_rlhf.overlay.learner.micro_batches.dp_idle_fraction`; None if unknown.
        skipped_rows: rows of ``nonfinite.jsonl`` for the latest rollout
            (:func:`sg_rlhf.overlay.learner.sample_mask.mask_nonfinite`).
        empty_responses: responses of the latest rollout without a token of the policy.
        reference: log-probs of the latest rollout that are computed during the update; None if they
            were computed before.
    """

    clock: PhaseTimer = PhaseTimer()
    rollout = 0
    idle_fraction: float | None = None
    skipped_rows: Sequence[dict[str, Any]] = ()
    empty_responses = 0
    reference: overlapped_reference.PendingLogProbs | None = None
    _masks_nonfinite = _overlaps_reference = _update_computes_old = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update_computes_old = old_log_probs.rule_of(self.args).of != "all"
        self._overlaps_reference = (
            self.initial_model_group is not None and overlapped_reference.can_overlap(self.args)
        )
        self._masks_nonfinite = self.args.sg.on_nonfinite == "skip"

    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Score a rollout and cut it into the micro-batches that the ranks train.

        Args:
            rollout_samples: experiences of one sample each, in the order of the prompts.

        Returns:
            Micro-batches: all of the first rank, all of the second, and so on.
        """
        with self.clock.section("make_experience"):
            samples = self.split_rollout_samples(rollout_samples)
            experiences = self.compute_advantages_and_returns(self.make_experience(samples))
            experiences = micro_batches.training_micro_batches(
                experiences, self.args, self.rollout, self.tokenizer.pad_token_id
            )
            if micro_batches.balances_micro_batches(self.args):
                self.idle_fraction = micro_batches.dp_idle_fraction(experiences, self.args)
            if self._overlaps_reference:
                self.reference = overlapped_reference.submit(
                    self.initial_model_group, experiences, self.args
                )
            for experience in experiences:
                experience.info[micro_batches.SAMPLE_INDEX] = torch.tensor(experience.index)
            return experiences

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Cut a rollout into micro-batches for the forward passes, rank after rank."""
        if not micro_batches.balances_micro_batches(self.args):
            split: list[Experience] = super().split_rollout_samples(rollout_samples)
            return split
        for i, sample in enumerate(rollout_samples):
            sample.index = [i]
        batches = micro_batches.scoring_micro_batches(rollout_samples, self.args)
        return micro_batches.concat(rollout_samples, batches, self.tokenizer.pad_token_id)

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Run the models' forward passes and add log-probs, rewards and KL to the samples.

        The policy's pass is skipped if the update computes the old log-probs
        (:mod:`.old_log_probs`), the reference's if it overlaps the update
        (:mod:`.overlapped_reference`). Models on GPUs of their own run at the same time.

        Args:
            samples_list: micro-batches; changed in place.

        Raises:
            NonFiniteError: a log-prob is not finite. With ``sg.on_nonfinite=skip`` such samples
                are masked with the advantages.
        """
        args = self.args
        train = args.train
        has_rewards = samples_list[0].rewards is not None
        if not has_rewards and self.reward_model_group is None:
            raise ValueError("reward_model_group is required when rewards are not precomputed")
        with_actor_or_ref = train.colocate_all or train.colocate_actor_ref
        inputs = micro_batches.forward_inputs(samples_list)
        rewards: list[ObjectRef] | None = None
        policy: list[ObjectRef] | None = None
        reference: list[ObjectRef] | None = None
        if not has_rewards:
            rewards = self._start_pass(
                "reward_model",
                self.reward_model_group,
                train.colocate_all,
                sequences=inputs["sequences"],
                attention_mask=inputs["attention_mask"],
                pad_sequence=[True] * len(samples_list),
            )
        if not self._update_computes_old:
            policy = self._start_pass(
                "old_log_probs", self.actor_model_group, with_actor_or_ref, **inputs
            )
        if self.initial_model_group is not None and not self._overlaps_reference:
            reference = self._start_pass(
                "reference_log_probs", self.initial_model_group, with_actor_or_ref, **inputs
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
        return samples_list

    def _start_pass(
        self, name: str, group: RayActorGroup, wait: bool, **inputs: list[Any]
    ) -> list[ObjectRef]:
        """Start a forward pass of a model on all its ranks.

        Args:
            name: of the section that the clock counts it in.
            group: upstream's group of the model's ranks.
            wait: whether it shares GPUs with the next model, so that it must finish first.
        """
        with self.clock.section(name):
            references: list[ObjectRef] = group.async_run_method_batch(
                method_name="forward", **inputs
            )
            if wait:
                self._wait_and_free(references, group)
        return references

    def _wait_and_free(self, references: list[ObjectRef], group: RayActorGroup) -> None:
        ray.get(references)
        ray.get(group.async_run_method(method_name="empty_cache"))

    def _results(
        self, name: str, references: list[ObjectRef] | None, samples: list[Experience]
    ) -> list[torch.Tensor | None]:
        """Results of a pass per micro-batch, zero outside the response; Nones for no pass."""
        if references is None:
            return [None] * len(samples)
        with self.clock.section(name):
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
        if self._masks_nonfinite:
            return
        for name, values in (
            ("policy", sample.action_log_probs),
            ("reference model", sample.base_action_log_probs),
        ):
            if values is not None:
                nonfinite.check_log_probs(name, values, mask_BT, sample.prompts[0])

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Upstream's advantages; with ``sg.advantage_std=population`` the paper's Eq. 4.

        Equal rewards give exactly 0 (:func:`with_equal_levelled`, :func:`level_equal`).

        A response can have no token of the policy, if an agent's context was full. It takes no part
        in the update, nor its reward in the statistics of its group. Upstream counts it there.

        Args:
            experiences: batches of any size; changed in place.

        Returns:
            The same, with ``advantages`` and ``returns`` [B, T].
        """
        # Before samples are masked: a masked sample has no tokens, but a valid reward.
        has_tokens = [e.action_mask.bool().any(dim=-1) for e in experiences]
        self.empty_responses = sum(int((~rows).sum()) for rows in has_tokens)
        if self._masks_nonfinite:
            group = self.args.rollout.n_samples_per_prompt
            self.skipped_rows = sample_mask.mask_nonfinite(experiences, group)
        if self.empty_responses and self.args.algo.advantage.estimator in COMPARING:
            return self._advantages_of_nonempty(experiences, has_tokens)
        experiences = super().compute_advantages_and_returns(experiences)
        if self.args.rollout.n_samples_per_prompt > 1:
            group = self.args.rollout.n_samples_per_prompt
            rewards_PG = _by_prompt(experiences, [e.info["reward"] for e in experiences], group)
            equal_PG = equal_rewards(rewards_PG).expand_as(rewards_PG)
            for experience, equal_B in zip(
                experiences, _by_experience(experiences, equal_PG), strict=True
            ):
                std_B = experience.info["group_reward_std"]
                experience.info["group_reward_std"] = std_B.masked_fill(equal_B, 0.0)
        if self.args.sg.advantage_std == "population":
            factor = population_std_correction(self.args.rollout.n_samples_per_prompt)
            for experience in experiences:
                experience.advantages = experience.advantages * factor
                experience.returns = experience.returns * factor
        return experiences

    def _advantages_of_nonempty(
        self, experiences: list[Experience], has_tokens: list[torch.Tensor]
    ) -> list[Experience]:
        """Upstream's advantages, comparing each response only with those that have tokens.

        Args:
            experiences: batches of any size, with ``index``; changed in place.
            has_tokens: bool [B] per experience.
        """
        args = self.args
        for e in experiences:
            e.rewards = e.rewards.to(torch.promote_types(e.rewards.dtype, torch.float32))
        apply_length_penalties(experiences, args)
        group = args.rollout.n_samples_per_prompt
        rewards_PG = _by_prompt(experiences, [e.rewards for e in experiences], group)
        counts_PG = _by_prompt(experiences, has_tokens, group)
        estimator, std = args.algo.advantage.estimator, args.sg.advantage_std
        compared = compared_rewards(rewards_PG, counts_PG, estimator, std)
        stds = counted_std(rewards_PG, counts_PG).expand_as(rewards_PG)
        for e, compared_B, stds_B in zip(
            experiences,
            _by_experience(experiences, compared),
            _by_experience(experiences, stds),
            strict=True,
        ):
            if group > 1:
                e.info["group_reward_std"] = stds_B
            reward = compute_reward(
                compared_B, self.kl_ctl.value, e.kl, e.action_mask, args.reward.clip_range
            )
            e.returns = self.get_cumulative_returns(reward, e.action_mask, 1.0)
            e.advantages = e.returns.clone()
            e.info["return"] = reward.sum(dim=-1)
            e.kl = None
        if estimator == "reinforce_baseline":
            masks = torch.cat([e.action_mask.flatten() for e in experiences]).bool()
            values = torch.cat([e.advantages.flatten() for e in experiences]).float()[masks]
            mean, scale = values.mean(), 1.0
            if not args.algo.advantage.no_std_norm:
                scale = float(values.var(correction=0).clamp(min=1e-8).rsqrt())
            for e in experiences:
                e.advantages = (e.advantages - mean) * scale
        return experiences


def _indices(experiences: list[Experience]) -> torch.Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))


def _by_prompt(
    experiences: list[Experience], values: Sequence[torch.Tensor], group: int
) -> torch.Tensor:
    """Values [B] of each experience, in the order of the rollout: [P, G]."""
    return torch.cat(list(values))[_indices(experiences).argsort()].view(-1, group)


def _by_experience(
    experiences: list[Experience], values_PG: torch.Tensor
) -> Sequence[torch.Tensor]:
    """The reverse of :func:`_by_prompt`."""
    sizes = [len(e.index) for e in experiences]
    return torch.split(values_PG.flatten()[_indices(experiences)], sizes)


def with_equal_levelled(apply_penalties: Callable[..., None]) -> Callable[..., None]:
    """Upstream's length penalties; afterwards equal rewards become 0 (:func:`level_equal`).

    Rewards are compared within a prompt, or within the rollout by an estimator that compares those.
    ``info["reward"]``, which is logged, keeps them.

    Args:
        apply_penalties: upstream calls it right before it computes advantages.
    """

    def apply(experiences: list[Experience], args: Namespace) -> None:
        apply_penalties(experiences, args)
        settings, group = args.algo.advantage, args.rollout.n_samples_per_prompt
        # With gamma < 1 equal rewards give each position of a response another return.
        of_rollout = settings.estimator == "reinforce" and settings.gamma == 1.0
        if of_rollout or settings.estimator == "flash_reinforce":
            group = sum(len(e.index) for e in experiences)
        elif settings.estimator not in COMPARING:
            return
        levelled = level_equal(_by_prompt(experiences, [e.rewards for e in experiences], group))
        for e, rewards_B in zip(experiences, _by_experience(experiences, levelled), strict=True):
            e.rewards = rewards_B

    return apply
