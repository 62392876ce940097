"""Upstream's executors, with errors of user code that upstream hides.

An executor turns a prompt into a response and its reward. The engine's actor owns one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor

from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.tasks import registry, reward_values
from sg_rlhf.tasks.reward import reward_named


class StrictSingleTurnExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]  # upstream has no types
    """Keeps the exception of a failing reward function.

    Upstream calls the reward function in a thread, logs whatever it raises and continues with
    ``reward=None``. Here the exception is kept under the sample's text, so that the engine can stop
    the run with its cause. An unusable return value is an error, too
    (:mod:`sg_rlhf.tasks.reward_values`). An ``async`` reward function is awaited. ``domain:NAME``
    in the place of a file is the domain's reward function.
    """

    def __init__(self, remote_rm_url: str | None = None) -> None:
        super().__init__(remote_rm_url)
        if self.reward_endpoints and self.reward_endpoints[0].startswith(registry.PREFIX):
            self.reward_func = reward_named(self.reward_endpoints[0])
        self.reward_errors: dict[str, BaseException] = {}

    async def _fetch_rewards_via_func(self, queries_list: list[str], *rest: list[str]) -> Any:
        rewards = super()._fetch_rewards_via_func(queries_list, *rest)
        return await self._keep_error(queries_list[0], rewards)

    async def _fetch_rewards_via_http(self, queries_list: list[str], *rest: list[str]) -> Any:
        rewards = super()._fetch_rewards_via_http(queries_list, *rest)
        return await self._keep_error(queries_list[0], rewards)

    async def _keep_error(self, sample: str, rewards: Awaitable[Any]) -> Any:
        try:
            (returned,) = await rewards  # upstream sends one prompt at a time
            if inspect.isawaitable(returned):
                returned = await returned
            return [reward_values.reward_fields(returned)]
        except BaseException as error:
            self.reward_errors[sample] = error
            raise


def check_agent_rewards(executor: AgentExecutorBase) -> None:
    """Make an agent's ``step`` raise a RewardError if its reward is not a tensor.

    Upstream calls ``rewards.item()``, which ends in an AttributeError without the agent's name.

    Args:
        executor: of an engine; one that is not upstream's multi-turn executor stays as it is.
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
