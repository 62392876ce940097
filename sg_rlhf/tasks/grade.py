"""The verdict on one response: one type for training rewards, tiny models and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sg_rlhf.common.text import truncate


@dataclass(frozen=True)
class Grade:
    """What a domain's grader says of one response.

    Attributes:
        reward: what trains.
        correct: what counts as accuracy, whatever the reward's scale.
        reason: one word on how the verdict came about.
        extracted: the answer as read from the response; None where none could be read.
        format_ok: the response has the form that the prompt asks for.
        logs: further figures of the domain; the same keys for every response, since OpenRLHF logs
            their means.
        others: verdicts of other rules by name, where an evaluation asks for them; None: none.
    """

    reward: float
    correct: bool
    reason: str
    extracted: str | None = None
    format_ok: bool = True
    logs: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, bool | None] = field(default_factory=dict)


#: (response, gold) -> its grade. In training the gold is a row's `answer`, always one string.
Grader: TypeAlias = Callable[[str, str], Grade]


def label_fault(label: Any, graders: Iterable[Grader]) -> str | None:
    """What is wrong with a label, by the graders that are to read it."""
    for grader in graders:
        if not isinstance(label, str):
            return f"{truncate(label)}, expected text"
        try:
            grader("", label)
        except ValueError as error:
            return str(error)
    return None
