"""Rollouts as experience: whole ones only, in order of prompts, with what the model wrote."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream
import torch

from sg_rlhf.common import dealing, step_times
from sg_rlhf.overlay import engine_log_probs, phases
from sg_rlhf.overlay.errors import RewardError
from sg_rlhf.overlay.step_clock import StepClock


class SGSamplesGenerator(upstream.SamplesGenerator):
    """Upstream's generator, which ends an epoch where its prompts no longer fill a rollout.

    Upstream would train on the incomplete rest, whose batches do not divide evenly
    (:mod:`sg_rlhf.overlay.layout`).

    A dialogue's response length counts the model's own tokens. Upstream takes the distance from
    the first to the last of them, so text that an environment wrote in between would count in the
    metrics and in the overlong penalty. Equal to upstream's where a response is one piece.
    """

    args: Any
    #: The controller's, once it is there.
    clock: StepClock = StepClock()
    #: Samples of the current evaluation that are finished; None while rollouts are generated.
    _evaluated: int | None = None
    #: When each response of the current rollout reached the controller; None in between.
    _arrived: list[float] | None = None

    def generate_samples(self, **generate_kwargs: Any) -> Any:
        """Upstream's, timed."""
        with self.clock.part("engines_wake"):  # and sleep; generating is a part of its own
            return super().generate_samples(**generate_kwargs)

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
        """Upstream's samples of ``num_prompts`` prompts; of training prompts all of them or none,
        in the order in which the prompts were drawn and not in that of completion.

        Returns:
            Samples, prompts drawn, and whether the data set is exhausted.
        """
        if dataloader_iter is not getattr(self, "_dataloader_iter", None):  # an evaluation
            return super()._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **kw)
        prompts = list(itertools.islice(dataloader_iter, num_prompts))  # the loader's batch is 1
        if len(prompts) < num_prompts:
            return [], len(prompts), True
        self._arrived = []
        group = self.args.rollout.n_samples_per_prompt
        asked: list[Any] = []
        with self.clock.part("generation"):
            samples, drawn, exhausted = super()._generate_vllm(
                _noted(itertools.chain(prompts, dataloader_iter), asked),
                num_prompts,
                dynamic_filtering,
                **kw,
            )
            samples = _in_order(samples, asked, group)
        # A prompt's responses arrive together.
        waited = step_times.longest_response(self._arrived[::group])
        self._arrived = None
        self.clock.move(waited, "generation", "longest_response")
        # Dynamic filtering may find no replacement for what it filtered out.
        whole = len(samples) >= num_prompts * group
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
        if self._arrived is not None:
            self._arrived.append(time.perf_counter())
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        if self._evaluated is not None:
            _refuse_non_finite(experience)  # there is no update that could do without it
        experience.response_length = experience.action_mask.sum(dim=-1)
        if self._evaluated is not None:
            self._evaluated += 1
            samples = generate_kwargs["n_samples_per_prompt"]
            phases.count(self._evaluated, len(self.eval_dataloader) * samples)
        return experience


def _refuse_non_finite(experience: Any) -> None:
    """The engine lets such a reward pass with ``sg.on_nonfinite=skip``."""
    rewards = experience.rewards
    if rewards is not None and not bool(torch.isfinite(rewards).all()):
        raise RewardError(
            f"the reward function gave {rewards.tolist()[0]} in an evaluation (prompt: "
            f"{experience.prompts[0][-200:]!r}); sg.on_nonfinite=skip is for rollouts alone"
        )


def _key(prompt: Any, label: Any) -> tuple[str, str]:
    return str(prompt), str(label)


def _noted(batches: Iterator[Any], asked: list[Any]) -> Iterator[Any]:
    """The loader's batches, whose prompts are added to ``asked`` as they are drawn."""
    for batch in batches:
        _, prompts, labels, _ = batch
        asked.extend(map(_key, prompts, labels))
        yield batch


def _in_order(samples: list[Any], asked: list[Any], group: int) -> list[Any]:
    """Whole groups of samples in the order in which their prompts were asked."""
    groups = [samples[i : i + group] for i in range(0, len(samples), group)]
    keys = [
        (_key(first.prompts[0], first.labels[0]), [s.sequences[0].tolist() for s in (first, *rest)])
        for first, *rest in groups
    ]
    order = dealing.in_dispatch_order(keys, asked)
    return [sample for i in order for sample in groups[i]]
