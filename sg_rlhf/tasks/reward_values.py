"""What a user's reward function or agent returned, as plain numbers.

OpenRLHF goes on without a reward where a function returns something else than its dict, and hands
strings and lists to torch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from sg_rlhf.tasks.reward import RewardFields

#: Characters of a value in a message.
LONGEST = 120
NUMBER = "a number, or a list or tensor of one"
EXPECTED = f'{NUMBER}, or a dict {{"rewards": number, "scores": number, "extra_logs": {{...}}}}'


class RewardValueError(ValueError):
    """A reward function returned something that cannot be used; one line for the user."""


def reward_fields(returned: Any) -> RewardFields:
    """``rewards``, ``scores`` and ``extra_logs`` of what a reward function returned, as floats.

    Args:
        returned: a dict as OpenRLHF expects it, or the reward alone. A list of one item counts as
            the item.

    Raises:
        RewardValueError: naming the field, its value and what is expected.
    """
    found = _only_item(returned)
    if not isinstance(found, Mapping):
        reward = _number(found)
        if reward is None:
            raise RewardValueError(f"it returned {_shown(returned)}, expected {EXPECTED}")
        return {"rewards": reward, "scores": reward, "extra_logs": {}}
    if "rewards" not in found:
        raise RewardValueError(
            f"it returned {_shown(found)}, a dict without `rewards`; expected {EXPECTED}"
        )
    reward = number_of("rewards", found["rewards"])
    scores = found.get("scores")
    return {
        "rewards": reward,
        "scores": reward if scores is None else number_of("scores", scores),
        "extra_logs": logs_of(found.get("extra_logs")),
    }


def logs_of(extra_logs: Any) -> dict[str, float]:
    """``extra_logs`` as floats; anything else: `RewardValueError`."""
    if extra_logs is None:
        return {}
    if not isinstance(extra_logs, Mapping):
        raise RewardValueError(
            f"`extra_logs` is {_shown(extra_logs)}, expected a dict of names and numbers"
        )
    return {str(k): number_of(f"extra_logs[{k!r}]", value) for k, value in extra_logs.items()}


def number_of(field: str, value: Any) -> float:
    """The one number that a field holds; anything else: `RewardValueError`."""
    found = _number(_only_item(value))
    if found is None:
        raise RewardValueError(f"`{field}` is {_shown(value)}, expected {NUMBER}")
    return found


def _only_item(value: Any) -> Any:
    """The item of a list, an array or a tensor of one; anything else as it is."""
    found = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
        found = found.tolist() if hasattr(found, "tolist") else found
    return found


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:  # a whole number beyond every float
        return math.inf


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())  # a tensor's has line breaks
    return f"{text if len(text) <= LONGEST else text[:LONGEST] + '...'} ({type(value).__name__})"
