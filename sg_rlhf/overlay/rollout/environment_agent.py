"""Rollouts of a domain with an environment: `train.agent_func_path: domain:NAME`.

Upstream's `MultiTurnAgentExecutor` is not used. It has no stop strings, and no limit for a turn or
a reply. It also changes the sampling parameters that all rollouts of a prompt share.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from openrlhf.utils.agent import AgentExecutorBase
from transformers import PreTrainedTokenizerBase
from vllm import RequestOutput, SamplingParams

from sg_rlhf.overlay.reporting.activity import ENGINE, show_message
from sg_rlhf.overlay.reporting.errors import EnvironmentDown, RewardError
from sg_rlhf.overlay.rollout.samples import Response
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.codec import TokenizerCodec
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.rollout import (
    Environment,
    EnvironmentFailed,
    EpisodeAborted,
    Generation,
    rollout,
)


def load_agent(name: str) -> EnvironmentAgent:
    """The agent of ``domain:NAME``."""
    return EnvironmentAgent(environment_of(registry.named_in(name)[0]))


def environment_of(domain: Domain) -> Environment:
    """A domain's environment, with the recipe's settings, which this process's variables hold."""
    assert domain.environment is not None
    settings = None if domain.settings is None else load(domain.settings).from_environment()
    return load(domain.environment)(settings, notify=partial(show_message, ENGINE))


class TokenEngine(Protocol):
    """What an agent needs of the engine's actor."""

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams
    ) -> RequestOutput:
        """Sample one turn."""


class EnvironmentAgent(AgentExecutorBase):  # type: ignore[misc]  # upstream has no types
    """Rollouts of one engine: the model and the environment take turns, and the end is graded."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._codec: TokenizerCodec | None = None
        self._check = asyncio.Lock()
        self._checked = False

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: PreTrainedTokenizerBase,
        llm_engine: TokenEngine,
        images: object = None,
    ) -> Response:
        """Sample and grade one rollout; raises RewardError for a wrong label, EnvironmentDown."""
        if self._codec is None:  # upstream copies the tokenizer for every prompt
            self._codec = TokenizerCodec(hf_tokenizer)
        codec = self._codec
        try:
            episode = self.environment.begin({"input": prompt, "answer": label}, codec)
        except ValueError as error:
            raise RewardError(f"{error}; the prompt ends: ...{prompt[-200:]!r}") from None
        await self._check_once()
        prompt_ids = codec.encode(prompt)
        budget = sampling_params.max_tokens or max(1, max_length - len(prompt_ids))
        n_prompt = len(prompt_ids)
        prompt_ids = prompt_ids[-max(1, max_length - budget) :]
        budget = min(budget, max_length - len(prompt_ids))
        with_log_probs = sampling_params.logprobs is not None

        async def generate(
            context: list[int], max_tokens: int, stop: tuple[str, ...]
        ) -> Generation:
            params = sampling_params.clone()  # all rollouts of a prompt share the original
            params.max_tokens = max_tokens
            params.stop = list(stop)
            params.include_stop_str_in_output = True
            request = await llm_engine.generate(context, params)
            output = request.outputs[0]
            token_ids = list(output.token_ids)
            log_probs = None
            if with_log_probs:
                entries = zip(token_ids, output.logprobs[: len(token_ids)], strict=True)
                log_probs = [entry[token].logprob for token, entry in entries]
            return Generation(token_ids, output.finish_reason == "length", log_probs)

        try:
            trajectory = await rollout(
                self.environment,
                episode,
                prompt_ids,
                budget,
                generate,
                codec,
                with_log_probs=with_log_probs,
            )
        except (EnvironmentFailed, EpisodeAborted) as error:
            raise EnvironmentDown(str(error)) from None
        # A grader may take seconds: other rollouts go on meanwhile.
        grade = await asyncio.to_thread(episode.grade)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": trajectory.token_ids,
            "action_ranges": trajectory.action_ranges,
            "rollout_log_probs": trajectory.log_probs,
            "truncated": trajectory.truncated,
            "reward": grade.reward,
            "scores": float(grade.correct),
            "extra_logs": {
                **trajectory.logs(grade),
                "prompt_cut": float(len(prompt_ids) < n_prompt),
            },
        }

    async def _check_once(self) -> None:
        """Check the environment before the first rollout, so that a wrong one stops the run."""
        if self._checked:
            return
        async with self._check:
            if self._checked:
                return
            try:
                await self.environment.check()
            except EnvironmentFailed as error:
                raise EnvironmentDown(str(error)) from None
            self._checked = True
