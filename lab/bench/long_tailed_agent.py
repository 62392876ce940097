"""Responses whose lengths are given: most are short, a few are as long as allowed.

The agent of ``lab/bench/async_rollouts.py``. A model that trains changes its lengths, and with them
what is measured; here each prompt's responses have lengths of their own in every run.
"""

from __future__ import annotations

import math
import random
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

#: Lengths are log-normal: this many tokens in the middle, this wide, cut at ``max_tokens``.
MEDIAN, SPREAD = 32, 1.0


def length(chance: random.Random, most: int) -> int:
    """Tokens of the next response, 1 to ``most``."""
    return max(1, min(most, round(chance.lognormvariate(math.log(MEDIAN), SPREAD))))


class AgentExecutor(SingleTurnAgentExecutor):
    """One response to a prompt, of a length that the prompt decides; its reward is a coin's."""

    def __init__(self) -> None:
        super().__init__(None)
        self._chances: dict[str, random.Random] = {}

    async def execute(
        self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Upstream's, neither shorter nor longer than drawn."""
        chance = self._chances.setdefault(prompt, random.Random(prompt))
        given = sampling_params.clone()
        given.min_tokens = given.max_tokens = length(chance, sampling_params.max_tokens)
        reward = float(chance.random() < 0.5)
        output = await super().execute(prompt, label, given, *args, **kwargs)
        return output | {"reward": reward, "scores": reward}
