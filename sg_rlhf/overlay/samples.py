"""Rollouts as experience: whole ones only, with the length of what the model wrote."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream

from sg_rlhf.overlay import engine_log_probs, phases


class SGSamplesGenerator(upstream.SamplesGenerator):
    """Upstream's generator, which ends an epoch where its prompts no longer fill a rollout.

    Upstream would train on the incomplete rest, whose batches do not divide evenly
    (:mod:`sg_rlhf.overlay.layout`).

    A dialogue's response length counts the model's own tokens. Upstream takes the distance from
    the first to the last of them, so text that an environment wrote in between would count in the
    metrics and in the overlong penalty. Equal to upstream's where a response is one piece.
    """

    args: Any
    #: Samples of the current evaluation that are finished; None while rollouts are generated.
    _evaluated: int | None = None

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Any]:
        """Upstream's, with a count of the finished samples for the terminal."""
        self._evaluated = 0
        try:
            found: list[Any] = super().generate_eval_samples(**generate_kwargs)
            return found
        finally:
            self._evaluated = None

    def _generate_vllm(
        self, dataloader_iter: Iterator[Any], num_prompts: int, dynamic_filtering: bool, **kw: Any
    ) -> tuple[list[Any], int, bool]:
        """Upstream's samples of ``num_prompts`` prompts; of training prompts all of them or none.

        Returns:
            Samples, prompts drawn, and whether the data set is exhausted.
        """
        if dataloader_iter is not getattr(self, "_dataloader_iter", None):  # an evaluation
            return super()._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **kw)
        prompts = list(itertools.islice(dataloader_iter, num_prompts))  # the loader's batch is 1
        if len(prompts) < num_prompts:
            return [], len(prompts), True
        samples, drawn, exhausted = super()._generate_vllm(
            itertools.chain(prompts, dataloader_iter), num_prompts, dynamic_filtering, **kw
        )
        # Dynamic filtering may find no replacement for what it filtered out.
        whole = len(samples) >= num_prompts * self.args.rollout.n_samples_per_prompt
        return samples if whole or not exhausted else [], drawn, exhausted

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kw: Any) -> Any:
        """Upstream asks for the engine's log-probs only where a correction reads them."""
        args: Any = self.args
        if not engine_log_probs.wanted(args):
            return super()._dispatch_prompts_to_vllm(prompts, labels, **kw)
        self.args = copy.copy(args)
        self.args.algo = copy.copy(args.algo)
        self.args.algo.advantage = copy.copy(args.algo.advantage)
        self.args.algo.advantage.is_correction_level = "token"
        try:
            return super()._dispatch_prompts_to_vllm(prompts, labels, **kw)
        finally:
            self.args = args

    def _process_response_into_experience(self, response: Any, **generate_kwargs: Any) -> Any:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.response_length = experience.action_mask.sum(dim=-1)
        if self._evaluated is not None:
            self._evaluated += 1
            samples = generate_kwargs["n_samples_per_prompt"]
            phases.count(self._evaluated, len(self.eval_dataloader) * samples)
        return experience
