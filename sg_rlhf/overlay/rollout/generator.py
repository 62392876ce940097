"""Rollouts as experience: whole ones only, in order of prompts, with what the model wrote."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream
import torch

from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout.async_buffer import AsyncRolloutBuffer, PromptBatch
from sg_rlhf.overlay.rollout.dispatch import Engines, RolloutDispatcher
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.run_dir import timing_keys


class SGSamplesGenerator(upstream.SamplesGenerator):
    """Upstream's generator, which ends an epoch where its prompts no longer fill a rollout.

    Upstream would train on the incomplete rest, whose batches do not divide evenly
    (:mod:`sg_rlhf.overlay.settings.layout_checks`).

    A dialogue's response length counts the model's own tokens. Upstream takes the distance from
    the first to the last of them, so text that an environment wrote in between would count in the
    metrics and in the overlong penalty. Equal to upstream's where a response is one piece.
    """

    args: Any
    vllm_engines: Any
    #: The controller's, once it is there.
    clock: PhaseTimer = PhaseTimer()
    #: The controller's, with which a lost engine is replaced.
    engines: Engines
    #: What the next prompts are asked for, and after how many rollouts: their responses' seeds.
    purpose, step = "rollout", 0
    #: Samples of the current evaluation that are finished; None while rollouts are generated.
    _evaluated: int | None = None
    #: When each response of the current rollout reached the controller; None in between.
    _arrived: list[float] | None = None
    #: Whom the prompts go to.
    _asking: RolloutDispatcher | None = None
    #: Of an asynchronous run: who draws the prompts, and has the samples.
    ahead: AsyncRolloutBuffer | None = None
    #: The names in ``extra_logs`` of the first response.
    _log_names: set[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of each prompt that was filtered out: its responses' tokens. Threads append to it.
        self._filtered: deque[int] = deque()

    def take_filtered(self) -> int:
        """Tokens that dynamic filtering left out since the last call."""
        return sum(self._filtered.popleft() for _ in range(len(self._filtered)))

    def generate_samples(self, **generate_kwargs: Any) -> Any:
        """Upstream's, timed; of an asynchronous run what was sampled ahead."""
        if self.ahead is not None:
            with self.clock.part("generation"):  # the wait for it
                return self.ahead.take(self.step)
        with self.clock.part("engines_wake"):  # and sleep; generating is a part of its own
            samples, share, drawn, over = super().generate_samples(**generate_kwargs)
        if share is not None:
            # Upstream counts a prompt that passed the filter once for each of its responses.
            responses = self.args.rollout.n_samples_per_prompt
            share = 100.0 * round(share * drawn / (100 * responses)) / drawn
        return samples, share, drawn, over

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
        """The samples of ``num_prompts`` prompts; of training prompts all of them or none, in the
        order in which the prompts were drawn and not in that of completion.

        Upstream's, which has neither that order nor an answer to an engine that is lost.

        Returns:
            Samples, prompts drawn, and whether the data set is exhausted.
        """
        drawn = list(itertools.islice(dataloader_iter, num_prompts))  # the loader's batch is 1
        short = len(drawn) < num_prompts
        if dataloader_iter is not getattr(self, "_dataloader_iter", None):  # an evaluation
            return self._responses_to(drawn, iter(()), False, **kw)[0], len(drawn), short
        if short:
            return [], len(drawn), True
        self._arrived = []
        with self.clock.part("generation"):
            samples, replaced, exhausted = self._responses_to(
                drawn, dataloader_iter, dynamic_filtering, **kw
            )
        group = self.args.rollout.n_samples_per_prompt
        # A prompt's responses arrive together.
        waited = timing_keys.longest_response(self._arrived[::group])
        self._arrived = None
        self.clock.move(waited, "generation", "longest_response")
        # Dynamic filtering may find no replacement for what it filtered out.
        whole = len(samples) >= num_prompts * group
        return samples if whole or not exhausted else [], len(drawn) + replaced, exhausted

    def _responses_to(
        self, drawn: list[Any], more: Iterator[Any], filtering: bool, **kw: Any
    ) -> tuple[list[Any], int, bool]:
        """Samples in order of their prompts, how many prompts of ``more`` took the place of those
        that dynamic filtering left out, and whether there was none left."""
        self._asking = asking = RolloutDispatcher(
            self.engines, self.args.train.seed, self.purpose, self.step
        )
        accepted: dict[int, list[Any]] = {}
        replaced, exhausted = 0, False
        try:
            self._ask(drawn, **kw)
            for prompt, responses in asking.answers():
                samples = [self._process_response_into_experience(r, **kw) for r in responses]
                if not (filtering and self._is_filtered_out(samples)):
                    accepted[prompt] = samples
                    continue
                instead = list(itertools.islice(more, 1))
                exhausted |= not instead
                replaced += len(instead)
                self._ask(instead, **kw)
        finally:
            self._asking = None
        return [s for prompt in sorted(accepted) for s in accepted[prompt]], replaced, exhausted

    def sample_ahead(
        self,
        unit: PromptBatch,
        answer: Callable[[int, list[Any]], list[Any]],
        engines: Engines,
        **kw: Any,
    ) -> None:
        """The responses to a unit's prompts, in a thread beside the controller's own.

        Args:
            answer: hears a prompt's place and its samples, [] of one that dynamic filtering leaves
                out, and returns the rows to ask in its place.
            engines: who replaces a lost one.
        """
        apart = copy.copy(self)  # an evaluation changes this one meanwhile
        apart._evaluated = apart._arrived = None
        todo = unit.unanswered()
        numbers = itertools.chain(todo, itertools.count(len(unit.drawn)))
        train = self.args.train
        apart._asking = asking = RolloutDispatcher(
            engines, train.seed, "rollout", unit.number, numbers, not train.partial_rollout_enable
        )
        apart._ask([unit.drawn[place] for place in todo], **kw)
        filtering = self.args.algo.dynamic_filtering_enable
        for place, responses in asking.answers():
            samples = [apart._process_response_into_experience(r, **kw) for r in responses]
            filtered = filtering and apart._is_filtered_out(samples)
            apart._ask(answer(place, [] if filtered else samples), **kw)

    def _is_filtered_out(self, samples: list[Any]) -> bool:
        """Whether the mean score of a prompt's responses is outside of the filter's range.

        Of those that have tokens; without any there is nothing to train. Counts the tokens of what
        is filtered out.
        """
        if not samples or any(sample.scores is None for sample in samples):
            return False
        samples = [sample for sample in samples if bool(sample.action_mask.any())]
        if not samples:
            return True
        lowest, highest = self.args.algo.dynamic_filtering_range
        mean = sum(sample.scores[0].item() for sample in samples) / len(samples)
        if lowest < mean < highest:
            return False
        self._filtered.append(sum(int(sample.action_mask.sum()) for sample in samples))
        return True

    def _ask(self, drawn: list[Any], **kw: Any) -> None:
        if not drawn:
            return
        _, prompts, labels, images = map(list, zip(*drawn, strict=True))
        flat = [list(itertools.chain.from_iterable(part)) for part in (prompts, labels, images)]
        self._dispatch_prompts_to_vllm(flat[0], flat[1], images=flat[2], **kw)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kw: Any) -> Any:
        """Upstream's choice of an engine for each prompt, whose request then goes our way."""
        assert self._asking is not None, "outside of _responses_to"
        with self._asked_for_log_probs():
            engines, self.vllm_engines = self.vllm_engines, self._asking.stand_ins()
            try:
                super()._dispatch_prompts_to_vllm(prompts, labels, **kw)
            finally:
                self.vllm_engines = engines
        self._asking.send()

    @contextlib.contextmanager
    def _asked_for_log_probs(self) -> Iterator[None]:
        """Upstream asks for the engine's log-probs only where a correction reads them."""
        args: Any = self.args
        if not worker_settings.needs_engine_log_probs(args):
            yield
            return
        self.args = copy.copy(args)
        self.args.algo = copy.copy(args.algo)
        self.args.algo.advantage = copy.copy(args.algo.advantage)
        self.args.algo.advantage.is_correction_level = "token"
        try:
            yield
        finally:
            self.args = args

    def _process_response_into_experience(self, response: Any, **generate_kwargs: Any) -> Any:
        if self._arrived is not None:
            self._arrived.append(time.perf_counter())
        self._check_log_names(response)
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        if self._evaluated is not None:
            _refuse_non_finite(experience)  # there is no update that could do without it
        experience.response_length = experience.action_mask.sum(dim=-1)
        if _is_cut_off(response, generate_kwargs.get("max_len", 2048)):
            experience.truncated = torch.ones_like(experience.truncated)
        experience.weight_runs = response.get("weight_versions")
        if self._evaluated is not None:
            self._evaluated += 1
            samples = generate_kwargs["n_samples_per_prompt"]
            activity.show_progress(self._evaluated, len(self.eval_dataloader) * samples)
        return experience

    def _check_log_names(self, response: Any) -> None:
        """Upstream makes one column of each name, which must have a value for every response."""
        names = {*(response.get("extra_logs") or {})}
        if self._log_names is None:
            self._log_names = names
        odd = sorted(names ^ self._log_names)
        if odd:
            raise RewardError(
                f"the reward function gave `extra_logs` with {odd[0]!r} for some responses only; "
                "expected the same names for every response (prompt: "
                f"{response['prompt'][-200:]!r})"
            )


def _is_cut_off(response: Any, max_len: int) -> bool:
    """Whether what an environment wrote fills the context, so that the model could not go on.

    Upstream's executor of several turns ends there, and calls it a proper end.
    """
    tokens = len(response["observation_tokens"])
    own_end = max((end for _, end in response["action_ranges"]), default=0)
    return own_end < tokens and tokens >= max_len


def _refuse_non_finite(experience: Any) -> None:
    """The engine lets such a reward pass with ``sg.on_nonfinite=skip``."""
    rewards = experience.rewards
    if rewards is not None and not bool(torch.isfinite(rewards).all()):
        raise RewardError(
            f"the reward function gave {rewards.tolist()[0]} in an evaluation (prompt: "
            f"{experience.prompts[0][-200:]!r}); sg.on_nonfinite=skip is for rollouts alone"
        )
