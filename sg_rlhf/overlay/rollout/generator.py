"""Generate responses with the rollout engines and turn them into experience."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import openrlhf.trainer.ppo_utils.samples_generator as upstream
import torch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from vllm import SamplingParams

from sg_rlhf.config.derived.async_config import AsyncConfig
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout.async_buffer import (
    BUFFER_KEY,
    AsyncRolloutBuffer,
    OnPromptDone,
    PromptBatch,
)
from sg_rlhf.overlay.rollout.dispatch import RolloutDispatcher
from sg_rlhf.overlay.rollout.engine_pool import EnginePool
from sg_rlhf.run_dir import timing_keys

#: Prompts of an evaluation that are sent to the engines at a time. vLLM queues what does not fit.
EVAL_PROMPTS = 1024


class SGSamplesGenerator(upstream.SamplesGenerator):
    """Generates whole rollouts, in the order of their prompts.

    Four differences to upstream:

    - An epoch ends where its prompts no longer fill a rollout. Upstream trains on the incomplete
      rest, whose batches do not divide evenly (:mod:`sg_rlhf.overlay.settings.rollout_plan`).
    - Responses are in the order of their prompts and not of their completion, and a lost engine is
      replaced (:mod:`sg_rlhf.overlay.rollout.dispatch`).
    - A dialogue's response length counts the model's tokens alone. Upstream takes the distance from
      the first to the last of them. An environment's text in between would then count in the
      metrics and in the overlong penalty.
    - A response may end with its first token. Upstream's engine masks these tokens there, and its
      trainer does not, so that the log-probs of first tokens differ.

    Attributes:
        clock: of the controller.
        engines: restarts a lost engine.
        step: index of the current rollout; seeds its responses.
        buffer: of an asynchronous run; None otherwise.
    """

    args: Any
    vllm_engines: Any
    clock: PhaseTimer = PhaseTimer()
    engines: EnginePool
    step = 0
    buffer: AsyncRolloutBuffer | None = None
    #: Names in ``extra_logs`` of the first response.
    _log_names: set[str] | None = None
    #: Prompts of the current epoch; None between epochs.
    _rows: Iterator[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Response tokens of each filtered prompt. Threads append to it.
        self._filtered: deque[int] = deque()

    def pop_filtered_tokens(self) -> int:
        """Tokens that dynamic filtering discarded since the last call."""
        return sum(self._filtered.popleft() for _ in range(len(self._filtered)))

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        """Responses to the next ``rollout.batch_size`` prompts.

        An asynchronous run takes them from its buffer, once they are complete.

        Returns:
            (samples, pass_rate, drawn, is_over): samples, none if the rest of the epoch does not
            fill a rollout; the share of prompts in % that passed dynamic filtering, None without
            it; prompts read from the data set; whether the epoch is over.
        """
        if self.buffer is not None:
            with self.clock.section("generation"):  # waiting
                return self.buffer.pop_batch(self.step)
        if self._rows is None:
            self._rows = iter(self.prompts_dataloader)
        # Waking the engines and putting them to sleep; generation is a section of its own.
        with self.clock.section("engines_wake"):
            self._call_if_sleeping("wake_up")
            samples, drawn, exhausted = self._generate_rollout(self._rows, **generate_kwargs)
            self._call_if_sleeping("sleep")
        if exhausted:
            self._rows = None
        pass_rate = None
        if self.args.algo.dynamic_filtering_enable and drawn:
            passed = len(samples) // self.args.rollout.n_samples_per_prompt
            pass_rate = 100.0 * passed / drawn
        return samples, pass_rate, drawn, exhausted

    def _generate_rollout(self, rows: Iterator[Any], **kw: Any) -> tuple[list[Any], int, bool]:
        """Samples of a whole rollout or none, prompts drawn, whether the data is exhausted."""
        size = self.args.rollout.batch_size
        batch = list(itertools.islice(rows, size))  # the loader's batches have one prompt
        if len(batch) < size:
            return [], len(batch), True
        filtering = self.args.algo.dynamic_filtering_enable
        dispatcher = RolloutDispatcher(self.engines, self.args.train.seed, "rollout", self.step)
        accepted: dict[int, list[Any]] = {}
        completion_times = []
        drawn, exhausted = len(batch), False
        with self.clock.section("generation"):
            self._submit(dispatcher, batch, **kw)
            for number, responses in dispatcher.completions():
                completion_times.append(time.perf_counter())
                samples = self._experiences(responses, **kw)
                if not (filtering and self._is_filtered_out(samples)):
                    accepted[number] = samples
                    continue
                replacement = list(itertools.islice(rows, 1))
                exhausted |= not replacement
                drawn += len(replacement)
                self._submit(dispatcher, replacement, **kw)
        tail = timing_keys.longest_response(completion_times)
        self.clock.reassign(tail, "generation", "longest_response")
        # Dynamic filtering may not find enough replacements.
        if exhausted and len(accepted) < size:
            return [], drawn, True
        return _in_order(accepted), drawn, exhausted

    @torch.no_grad()
    def generate_eval_samples(
        self, loader: Any, namespace: str = "rollout", **generate_kwargs: Any
    ) -> list[Any]:
        """Responses to every prompt of an evaluation set, in the order of the prompts.

        Args:
            loader: yields one prompt at a time.
            namespace: of the responses' seeds.
            generate_kwargs: sampling settings, with ``n_samples_per_prompt``.

        Raises:
            RewardError: a reward is not finite.
        """
        rows = iter(loader)
        total = len(loader) * generate_kwargs["n_samples_per_prompt"]
        all_samples: list[Any] = []
        self._call_if_sleeping("wake_up")
        size = max(EVAL_PROMPTS, self.args.rollout.batch_size)
        is_exhausted = False
        while not is_exhausted:
            batch = list(itertools.islice(rows, size))
            is_exhausted = len(batch) < size
            dispatcher = RolloutDispatcher(self.engines, self.args.train.seed, namespace, self.step)
            self._submit(dispatcher, batch, **generate_kwargs)
            completed: dict[int, list[Any]] = {}
            for number, responses in dispatcher.completions():
                completed[number] = self._experiences(responses, **generate_kwargs)
                for sample in completed[number]:
                    _refuse_non_finite(sample)  # there is no update that could skip it
                finished = len(all_samples) + sum(map(len, completed.values()))
                activity.show_progress(finished, total)
            all_samples += _in_order(completed)
        self._call_if_sleeping("sleep")
        return all_samples

    @torch.no_grad()
    def generate_async(
        self,
        batch: PromptBatch,
        on_prompt_done: OnPromptDone,
        engines: EnginePool,
        **kw: Any,
    ) -> None:
        """Responses to the pending prompts of a batch. Runs in a thread of the async buffer.

        Args:
            batch: prompts to complete.
            on_prompt_done: called with a prompt's index and its samples ([] if dynamic filtering
                discards it); returns the prompts to submit instead.
            engines: restarts a lost engine.
        """
        pending = batch.pending()
        numbers = itertools.chain(pending, itertools.count(len(batch.prompts)))
        train = self.args.train
        dispatcher = RolloutDispatcher(
            engines, train.seed, "rollout", batch.number, numbers, not train.partial_rollout_enable
        )
        self._submit(dispatcher, [batch.prompts[index] for index in pending], **kw)
        filtering = self.args.algo.dynamic_filtering_enable
        for index, responses in dispatcher.completions():
            samples = self._experiences(responses, **kw)
            is_filtered = filtering and self._is_filtered_out(samples)
            self._submit(dispatcher, on_prompt_done(index, [] if is_filtered else samples), **kw)

    def start_async(
        self,
        config: AsyncConfig,
        states: dict[str, Any],
        engines: EnginePool,
        generate_kwargs: dict[str, Any],
    ) -> AsyncRolloutBuffer:
        """Take rollouts from a buffer from now on. It submits no prompt yet.

        Args:
            config: of the run.
            states: a checkpoint's client state, or that of a new run.
            engines: restarts a lost engine.
            generate_kwargs: of :meth:`generate_async`.
        """

        def sample(batch: PromptBatch, on_prompt_done: OnPromptDone) -> None:
            self.generate_async(batch, on_prompt_done, engines, **generate_kwargs)

        epochs = self.args.train.num_episodes - states["episode"]
        self.buffer = AsyncRolloutBuffer(
            config, self.prompts_dataloader, epochs, sample, engines.trainer_lock
        )
        # The controller loads the loader's state after the first weight sync.
        if loader := states.get("data_loader_state_dict"):
            self.buffer.restore({**states.get(BUFFER_KEY, {}), "loader": loader})
        return self.buffer

    def _call_if_sleeping(self, method: str) -> None:
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, method)

    def _submit(self, dispatcher: RolloutDispatcher, rows: list[Any], **kw: Any) -> None:
        """Send prompts to the engines.

        Args:
            rows: of the data loader, (sources, prompts, labels, images) of one prompt each.
            kw: upstream's generation settings; those not set have upstream's defaults.
        """
        if not rows:
            return
        sampling_params = SamplingParams(
            temperature=kw.get("temperature", 1.0),
            top_p=kw.get("top_p", 1.0),
            top_k=kw.get("top_k", -1),
            max_tokens=kw.get("max_new_tokens"),  # None: the rest of the context
            # Above 0 the engine masks the tokens that end a response; the trainer does not.
            min_tokens=0,
            skip_special_tokens=kw.get("skip_special_tokens", False),
            logprobs=1,
        )
        prompts = [
            {
                "prompt": prompt,
                "label": label,
                "images": images,
                "sampling_params": sampling_params,
                "max_length": kw.get("max_len", 2048),
                "hf_tokenizer": self.tokenizer,
            }
            for _, *columns in rows
            for prompt, label, images in zip(*columns, strict=True)
        ]
        n_samples = kw.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        dispatcher.submit(prompts, n_samples)

    def _is_filtered_out(self, samples: list[Any]) -> bool:
        """Whether the mean score of a prompt's responses is outside the filter's range.

        Responses without a token do not count; a prompt with no other has nothing to train on.
        Adds the tokens of a filtered prompt to the count.
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

    def _experiences(self, responses: Iterable[Any], **kw: Any) -> list[Any]:
        return [self._process_response_into_experience(response, **kw) for response in responses]

    def _process_response_into_experience(self, response: Any, **generate_kwargs: Any) -> Any:
        """Upstream's conversion, with the length, the truncation and the weight versions.

        Args:
            response: one item of an engine's ``generate_responses``.

        Returns:
            An ``Experience`` of one sample, with ``weight_runs``.
        """
        self._check_log_names(response)
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.response_length = experience.action_mask.sum(dim=-1)
        if _fills_context(response, generate_kwargs.get("max_len", 2048)):
            experience.truncated = torch.ones_like(experience.truncated)
        experience.weight_runs = response.get("weight_versions")
        return experience

    def _check_log_names(self, response: Any) -> None:
        """Upstream makes one column per name, which needs a value for every response."""
        names = {*(response.get("extra_logs") or {})}
        if self._log_names is None:
            self._log_names = names
        different = sorted(names ^ self._log_names)
        if different:
            raise RewardError(
                f"the reward function gave `extra_logs` with {different[0]!r} for some responses "
                "only; expected the same names for every response (prompt: "
                f"{response['prompt'][-200:]!r})"
            )


def _in_order(samples_by_prompt: dict[int, list[Any]]) -> list[Any]:
    return [s for number in sorted(samples_by_prompt) for s in samples_by_prompt[number]]


def _fills_context(response: Any, max_len: int) -> bool:
    """Whether an environment's text fills the context, so that the model could not continue.

    Upstream's multi-turn executor stops there, and does not mark the response as truncated.
    """
    n_tokens = len(response["observation_tokens"])
    last_action = max((end for _, end in response["action_ranges"]), default=0)
    return last_action < n_tokens and n_tokens >= max_len


def _refuse_non_finite(experience: Any) -> None:
    """With ``sg.on_nonfinite=skip`` the engine accepts such a reward."""
    rewards = experience.rewards
    if rewards is not None and not bool(torch.isfinite(rewards).all()):
        raise RewardError(
            f"the reward function gave {rewards.tolist()[0]} in an evaluation (prompt: "
            f"{experience.prompts[0][-200:]!r}); sg.on_nonfinite=skip is for rollouts alone"
        )
