"""The types that suites, engines and graders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


class EvalError(ValueError):
    """An evaluation that cannot run as asked; the message is one line for the user."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """A library's message for the user: its words on one line, the class if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True)
class Settings:
    """How the responses of a benchmark are sampled.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: tokens of the response alone; cut to what the model's context leaves.
        n: responses per question.
        top_p: nucleus; 1 is all tokens.
    """

    temperature: float
    max_tokens: int
    n: int = 1
    top_p: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """One prompt with its gold answer.

    Attributes:
        id: unique in its benchmark.
        prompt: raw text; no chat template is applied to it.
        gold: what the grader needs, as JSON can hold it.
        group: questions are also scored by group (number of people of a puzzle); "" for none.
    """

    id: str
    prompt: str
    gold: Any
    group: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a grader says of one response.

    Attributes:
        extracted: the answer as read from the response; None where none could be read.
        reason: one word on how the verdict came about.
    """

    correct: bool
    extracted: str | None
    reason: str


#: (response, gold) pairs -> a verdict for each, in order.
Grader: TypeAlias = Callable[[Sequence[tuple[str, Any]]], list[Verdict]]
