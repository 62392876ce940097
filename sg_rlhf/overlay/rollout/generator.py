"""Generate responses with the rollout engines and turn them into experience."""

from __future__ import annotations

import itertools
import math
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase
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
from sg_rlhf.overlay.rollout.samples import (
    PromptRow,
    Response,
    RolloutSamples,
    Sampling,
    reward_error,
    to_experience,
)
from sg_rlhf.run_dir import timing_keys

#: Prompts of an evaluation that are sent to the engines at a time. vLLM queues what does not fit.
EVAL_PROMPTS = 1024


class SamplesGenerator:
    """Generates whole rollouts, in the order of their prompts.

    Differences to upstream: an epoch ends where its prompts no longer fill a rollout
    (:mod:`sg_rlhf.overlay.settings.rollout_plan`); a lost engine is replaced (:mod:`.dispatch`).
    """

    clock: PhaseTimer = PhaseTimer()
    engines: EnginePool

    def __init__(
        self, args: Namespace, prompts: StatefulDataLoader, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.args, self.prompts, self._tokenizer = args, prompts, tokenizer
        self.sampling = Sampling.of_rollouts(args)
        self.step = 0
        self.buffer: AsyncRolloutBuffer | None = None
        #: Names in ``extra_logs`` of the first response.
        self._log_names: set[str] | None = None
        #: Prompts of the current epoch; None between epochs.
        self._rows: Iterator[PromptRow] | None = None
        #: Response tokens of each filtered prompt. Threads append to it.
        self._filtered: deque[int] = deque()

    def pop_filtered_tokens(self) -> int:
        """Tokens that dynamic filtering discarded since the last call."""
        return sum(self._filtered.popleft() for _ in range(len(self._filtered)))

    @torch.no_grad()
    def generate_samples(self) -> RolloutSamples:
        """Responses to the next ``rollout.batch_size`` prompts, from the buffer of an async run."""
        if self.buffer is not None:
            with self.clock.section("generation"):  # waiting
                return self.buffer.pop_batch(self.step)
        if self._rows is None:
            self._rows = iter(self.prompts)
        # Waking the engines and putting them to sleep; generation is a section of its own.
        with self.clock.section("engines_wake"):
            self._call_if_sleeping("wake_up")
            samples, drawn, exhausted = self._generate_rollout(self._rows)
            self._call_if_sleeping("sleep")
        if exhausted:
            self._rows = None
        pass_rate = None
        if self.args.algo.dynamic_filtering_enable and drawn:
            passed = len(samples) // self.args.rollout.n_samples_per_prompt
            pass_rate = 100.0 * passed / drawn
        return RolloutSamples(samples, pass_rate, drawn, is_epoch_over=exhausted)

    def _generate_rollout(self, rows: Iterator[PromptRow]) -> tuple[list[Experience], int, bool]:
        """Samples of a whole rollout or none, prompts drawn, whether the data is exhausted."""
        size = self.args.rollout.batch_size
        batch = list(itertools.islice(rows, size))  # the loader's batches have one prompt
        if len(batch) < size:
            return [], len(batch), True
        filtering = self.args.algo.dynamic_filtering_enable
        dispatcher = RolloutDispatcher(self.engines, self.args.train.seed, "rollout", self.step)
        accepted: dict[int, list[Experience]] = {}
        completion_times = []
        drawn, exhausted = len(batch), False
        with self.clock.section("generation"):
            self._submit(dispatcher, batch, self.sampling)
            for number, responses in dispatcher.completions():
                completion_times.append(time.perf_counter())
                samples = self._experiences(responses)
                if not (filtering and self._is_filtered_out(samples)):
                    accepted[number] = samples
                    continue
                replacement = list(itertools.islice(rows, 1))
                exhausted |= not replacement
                drawn += len(replacement)
                self._submit(dispatcher, replacement, self.sampling)
        tail = timing_keys.longest_response(completion_times)
        self.clock.reassign(tail, "generation", "longest_response")
        # Dynamic filtering may not find enough replacements.
        if exhausted and len(accepted) < size:
            return [], drawn, True
        return _in_order(accepted), drawn, exhausted

    @torch.no_grad()
    def generate_eval_samples(
        self, loader: StatefulDataLoader, sampling: Sampling, namespace: str = "rollout"
    ) -> list[Experience]:
        """Responses to every prompt of an evaluation set, in order; RewardError if not finite."""
        rows = iter(loader)
        total = len(loader) * sampling.n_samples_per_prompt
        all_samples: list[Experience] = []
        self._call_if_sleeping("wake_up")
        size = max(EVAL_PROMPTS, self.args.rollout.batch_size)
        is_exhausted = False
        while not is_exhausted:
            batch = list(itertools.islice(rows, size))
            is_exhausted = len(batch) < size
            dispatcher = RolloutDispatcher(self.engines, self.args.train.seed, namespace, self.step)
            self._submit(dispatcher, batch, sampling)
            completed: dict[int, list[Experience]] = {}
            for number, responses in dispatcher.completions():
                # There is no update that could skip a reward.
                completed[number] = self._experiences(responses, may_skip=False)
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
    ) -> None:
        """Responses to the pending prompts of a batch. Runs in a thread of the async buffer."""
        pending = batch.pending()
        numbers = itertools.chain(pending, itertools.count(len(batch.prompts)))
        train = self.args.train
        dispatcher = RolloutDispatcher(
            engines, train.seed, "rollout", batch.number, numbers, not train.partial_rollout_enable
        )
        self._submit(dispatcher, [batch.prompts[index] for index in pending], self.sampling)
        filtering = self.args.algo.dynamic_filtering_enable
        for index, responses in dispatcher.completions():
            samples = self._experiences(responses)
            is_filtered = filtering and self._is_filtered_out(samples)
            replacements = on_prompt_done(index, [] if is_filtered else samples)
            self._submit(dispatcher, replacements, self.sampling)

    def start_async(
        self,
        config: AsyncConfig,
        states: dict[str, Any],
        engines: EnginePool,
    ) -> AsyncRolloutBuffer:
        """Take rollouts from a buffer from now on. It submits no prompt yet."""

        def sample(batch: PromptBatch, on_prompt_done: OnPromptDone) -> None:
            self.generate_async(batch, on_prompt_done, engines)

        epochs = self.args.train.num_episodes - states["episode"]
        self.buffer = AsyncRolloutBuffer(config, self.prompts, epochs, sample, engines.trainer_lock)
        # The controller loads the loader's state after the first weight sync.
        if loader := states.get("data_loader_state_dict"):
            self.buffer.restore({**states.get(BUFFER_KEY, {}), "loader": loader})
        return self.buffer

    def _call_if_sleeping(self, method: str) -> None:
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.engines.handles, method)

    def _submit(
        self, dispatcher: RolloutDispatcher, rows: list[PromptRow], sampling: Sampling
    ) -> None:
        """Send prompts to the engines."""
        if not rows:
            return
        sampling_params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            # Above 0 the engine masks the tokens that end a response; the trainer does not.
            min_tokens=0,
            skip_special_tokens=False,
            logprobs=1,
        )
        prompts = [
            {
                "prompt": prompt,
                "label": label,
                "sampling_params": sampling_params,
                "max_length": sampling.max_len,
                "hf_tokenizer": self._tokenizer,
            }
            for _, *columns in rows
            for prompt, label, _images in zip(*columns, strict=True)
        ]
        dispatcher.submit(prompts, sampling.n_samples_per_prompt)

    def _is_filtered_out(self, samples: list[Experience]) -> bool:
        """Whether the mean score of a prompt's responses is outside the filter's range.

        Responses without a token do not count. Adds the tokens of a filtered prompt to the count.
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

    def _experiences(
        self, responses: Iterable[Response], may_skip: bool = True
    ) -> list[Experience]:
        for response in responses:
            self._check_log_names(response)
            self._check_reward(response, may_skip and self.args.sg.on_nonfinite == "skip")
        return [to_experience(response, self.sampling.max_len) for response in responses]

    def _check_reward(self, response: Response, may_skip: bool) -> None:
        """Stop at a reward that is not finite, unless the update skips its group."""
        reward = response["reward"]
        if reward is None or math.isfinite(reward):
            return
        if not may_skip:
            text = self._tokenizer.decode(response["observation_tokens"], skip_special_tokens=False)
            raise reward_error(response, f"`rewards` is {reward}, expected a finite number", text)
        response["scores"] = 0.0  # one that is not finite would pass dynamic filtering

    def _check_log_names(self, response: Response) -> None:
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


def _in_order(samples_by_prompt: dict[int, list[Experience]]) -> list[Experience]:
    return [s for number in sorted(samples_by_prompt) for s in samples_by_prompt[number]]
