"""Experience making: batches that are dealt, a finite check, KL by our names, Eq. 4's std."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import openrlhf.trainer.ppo_utils.experience_maker as upstream
import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from sg_rlhf.algo.advantages import (
    COMPARING,
    compared_rewards,
    counted_std,
    population_std_correction,
)
from sg_rlhf.overlay.learner import (
    kl,
    micro_batches,
    nonfinite,
    old_log_probs,
    overlapped_reference,
    sample_mask,
)
from sg_rlhf.overlay.learner.policy_loss import kl_dispatcher
from sg_rlhf.overlay.reporting.timing import PhaseTimer

#: Stands for the results of a pass that is not made.
_SKIPPED = object()


class SGExperienceMaker(upstream.RemoteExperienceMaker):
    """Upstream's experience maker with checks where it hands data on to the update."""

    #: The controller's, once it is there.
    clock: PhaseTimer = PhaseTimer()
    #: The number of the rollout in the run, which with the seed decides its optimizer steps.
    rollout = 0
    #: Of the latest update, see :func:`sg_rlhf.overlay.learner.micro_batches.dp_idle_fraction`;
    # None where unknown.
    waiting_share: float | None = None
    #: Of the latest rollout, see :func:`sg_rlhf.overlay.learner.sample_mask.mask_nonfinite`.
    left_out: Sequence[dict[str, Any]] = ()
    #: Responses of the latest rollout without a token that the policy sampled.
    empty_responses = 0
    #: The latest rollout's, where they are computed during the update.
    reference: overlapped_reference.PendingLogProbs | None = None
    _leaves_out = _late = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kl = kl_dispatcher(self.args, None)
        self._waited_for: list[tuple[Any, str]] = []
        self._skips = old_log_probs.is_needed(self.args).of != "all"
        self._late = self.initial_model_group is not None and overlapped_reference.can_overlap(
            self.args
        )
        self._leaves_out = self.args.sg.on_nonfinite == "skip"
        self._samples: list[Any] = []

    def _dispatch_forward(self, group: Any, sync_condition: bool, **kwargs: Any) -> Any:
        """Upstream's pass of one model, timed; it waits for it here where models share GPUs.

        None of the policy where its old log-probs are the update's business, nor of the reference
        where it is made beside the update.
        """
        if self._skips and group is self.actor_model_group:
            return _SKIPPED
        if self._late and group is self.initial_model_group:
            return _SKIPPED
        name = self._pass_of(group)
        with self.clock.part(name):
            refs = super()._dispatch_forward(group, sync_condition, **kwargs)
        self._waited_for.append((refs, name))
        return refs

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        """Upstream's; the wait for a model that runs beside others is that model's."""
        if refs is _SKIPPED:
            return [torch.zeros(sample.action_mask.shape) for sample in self._samples]
        names = [name for waited_for, name in self._waited_for if waited_for is refs]
        with self.clock.part(names[0] if names else "make_experience"):
            found: list[Any] = super()._flatten_results(refs, duplicate_factor)
        # Upstream multiplies by the mask, which a NaN survives.
        return [
            values.masked_fill(sample.action_mask == 0, 0.0)
            if torch.is_tensor(values) and values.shape == sample.action_mask.shape
            else values
            for values, sample in zip(found, self._samples, strict=True)
        ]

    def _pass_of(self, group: Any) -> str:
        """What the clock calls the forward passes of a group of ranks."""
        named = {
            "old_log_probs": self.actor_model_group,
            "reference_log_probs": self.initial_model_group,
            "reward_model": self.reward_model_group,
            "values": self.critic_model_group,
        }
        return next(name for name, ranks in named.items() if ranks is group)

    def split_rollout_samples(self, rollout_samples: list[Any]) -> list[Any]:
        """The rollout's micro-batches for the passes before the update, rank after rank."""
        if not micro_batches.into_micro_batches(self.args):
            split: list[Any] = super().split_rollout_samples(rollout_samples)
            return split
        for i, sample in enumerate(rollout_samples):
            sample.index = [i]
        dealt = micro_batches.scoring_micro_batches(rollout_samples, self.args)
        return micro_batches.concat(rollout_samples, dealt, self.tokenizer.pad_token_id)

    def make_experience_batch(self, rollout_samples: list[Any]) -> list[Any]:
        """Upstream's samples with log-probs and advantages, as the actor's ranks train them."""
        with self.clock.part("make_experience"):
            experiences: list[Any] = super().make_experience_batch(rollout_samples)
            if micro_batches.is_balanced(self.args):
                pad_token_id = self.tokenizer.pad_token_id
                experiences = micro_batches.training_micro_batches(
                    experiences, self.args, self.rollout, pad_token_id
                )
                if micro_batches.into_micro_batches(self.args):
                    self.waiting_share = micro_batches.dp_idle_fraction(experiences, self.args)
            if self._late:
                self.reference = overlapped_reference.submit(
                    self.initial_model_group, experiences, self.args
                )
            if self._leaves_out:
                # Of an index upstream's ranks keep nothing.
                for experience in experiences:
                    experience.info[nonfinite.PLACE] = torch.tensor(experience.index)
            return experiences

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """Upstream's log-probs of policy and reference; raises if one is not finite.

        With ``sg.on_nonfinite=skip`` such samples are left out with the advantages.
        """
        self._waited_for, self._samples = [], samples_list
        with kl.kl_context(self._kl):
            samples = super().make_experience(samples_list)
        for sample in samples:
            has_tokens = sample.action_mask.bool().any(dim=-1)
            for key in ("kl", "logprobs_diff"):  # upstream divides by the response's tokens
                sample.info[key] = torch.where(has_tokens, sample.info[key], 0.0)
            if self._skips:
                sample.action_log_probs = None
            if self._late:
                sample.base_action_log_probs = None
            for name, log_probs in (
                ("policy", sample.action_log_probs),
                ("reference model", sample.base_action_log_probs),
            ):
                if log_probs is not None and not self._leaves_out:
                    old_log_probs.check_finite(
                        name, log_probs, sample.action_mask, sample.prompts[0]
                    )
        return samples

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """Upstream's advantages; with ``sg.advantage_std=population`` Eq. 4's std instead.

        A response without a token that the policy sampled (an agent's that had no room left) has
        no part in the update. Upstream still compares the others of its group with its reward.
        """
        # Before samples are left out, which masks theirs: their rewards are sound.
        has_tokens = [e.action_mask.bool().any(dim=-1) for e in experiences]
        self.empty_responses = sum(int((~rows).sum()) for rows in has_tokens)
        if self._leaves_out:
            group = self.args.rollout.n_samples_per_prompt
            self.left_out = sample_mask.mask_nonfinite(experiences, group)
        if self.empty_responses and self.args.algo.advantage.estimator in COMPARING:
            return self._advantages_among(experiences, has_tokens)
        experiences = super().compute_advantages_and_returns(experiences)
        if self.args.sg.advantage_std == "population":
            factor = population_std_correction(self.args.rollout.n_samples_per_prompt)
            for experience in experiences:
                experience.advantages = experience.advantages * factor
                experience.returns = experience.returns * factor
        return experiences

    def _advantages_among(
        self, experiences: list[Any], has_tokens: list[torch.Tensor]
    ) -> list[Any]:
        """As upstream's, but a response is compared with those that have tokens alone.

        Args:
            experiences: of any cut, with ``index``; changed in place.
            has_tokens: bool [B] of each.
        """
        args = self.args
        for e in experiences:
            e.rewards = e.rewards.to(torch.promote_types(e.rewards.dtype, torch.float32))
        apply_length_penalties(experiences, args)
        places = torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))
        rewards = torch.cat([e.rewards for e in experiences])
        counts = torch.cat(has_tokens)
        order = places.argsort()
        group = args.rollout.n_samples_per_prompt
        rewards_PG, counts_PG = rewards[order].view(-1, group), counts[order].view(-1, group)
        estimator, std = args.algo.advantage.estimator, args.sg.advantage_std
        compared = compared_rewards(rewards_PG, counts_PG, estimator, std).flatten()[places]
        stds = counted_std(rewards_PG, counts_PG).expand(-1, group).flatten()[places]
        sizes = [len(e.index) for e in experiences]
        for e, own, own_stds in zip(
            experiences, compared.split(sizes), stds.split(sizes), strict=True
        ):
            if group > 1:
                e.info["group_reward_std"] = own_stds
            reward = compute_reward(
                own, self.kl_ctl.value, e.kl, e.action_mask, args.reward.clip_range
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
