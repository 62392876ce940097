"""Upstream's executors, with errors of user code that upstream hides.

An executor turns a prompt into a response and its reward. The engine's actor owns one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams

from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.rollout.samples import Response, reward_error
from sg_rlhf.tasks import registry, reward_values
from sg_rlhf.tasks.reward import Completion, RewardFields, fields_of

Reward: TypeAlias = Callable[[Completion], Awaitable[RewardFields]]


class StrictSingleTurnExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]  # upstream has no types
    """Grades the response's own tokens, and stops where a reward function fails.

    Upstream passes the decoded prompt and response as one text, logs whatever a reward function
    raises and continues with ``reward=None``.
    """

    def __init__(self, remote_rm_url: list[str] | str | None = None) -> None:
        super().__init__()  # it generates only
        self._reward = reward_of(remote_rm_url) if remote_rm_url else None

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: PreTrainedTokenizerBase,
        *args: Any,
        **kwargs: Any,
    ) -> Response:
        """Generate and grade a response; raises RewardError with the cause and the sample."""
        output: Response = await super().execute(
            prompt, label, sampling_params, max_length, hf_tokenizer, *args, **kwargs
        )
        if self._reward is None:
            return output
        ((start, end),) = output["action_ranges"]
        response = hf_tokenizer.decode(
            output["observation_tokens"][start:end],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        try:
            found = await self._reward(Completion(prompt, response, label))
        except Exception as error:  # a user's code raises anything
            known = isinstance(error, reward_values.RewardValueError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            raise reward_error(output, why, prompt + response) from error
        output["reward"], output["scores"] = found["rewards"], found["scores"]
        output["extra_logs"] = found["extra_logs"]
        return output


def reward_of(remote_rm_url: list[str] | str) -> Reward:
    """The reward ``domain:NAME[/GRADER]``, of a Python file, or of servers' addresses."""
    endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url
    if endpoints[0].startswith(registry.PREFIX):
        _, grader = registry.named_in(endpoints[0])

        async def graded(completion: Completion) -> RewardFields:
            # It may take seconds: other responses go on meanwhile.
            grade = await asyncio.to_thread(grader, completion.response, completion.label)
            return fields_of(grade)

        return graded
    upstream = SingleTurnAgentExecutor(endpoints)
    fetch = (
        upstream._fetch_rewards_via_func
        if upstream.reward_func
        else upstream._fetch_rewards_via_http
    )

    async def fetched(completion: Completion) -> RewardFields:
        (returned,) = await fetch(*completion.reward_arguments())
        if inspect.isawaitable(returned):  # of an async function
            returned = await returned
        return reward_values.reward_fields(returned)

    return fetched


def check_agent_rewards(executor: AgentExecutorBase) -> None:
    """Make the ``step`` of a multi-turn agent raise RewardError if its reward is no tensor.

    Upstream calls ``rewards.item()``, which ends in an AttributeError without the agent's name.
    """
    if isinstance(executor, MultiTurnAgentExecutor):
        executor.agent_instance_cls = _with_checked_step(executor.agent_instance_cls)


def _with_checked_step(agent: type) -> type:
    class CheckedAgent(agent):  # type: ignore[misc]  # upstream has no types
        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
            result = await super().step(state_dict, **kwargs)
            reward = result.get("rewards")
            if not hasattr(reward, "item"):
                raise RewardError(
                    f"{agent.__name__}.step returned `rewards` = {reward!r} "
                    f"({type(reward).__name__}), expected a tensor of one number: torch.tensor(...)"
                )
            return result

    return CheckedAgent
