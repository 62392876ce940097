"""One episode of a domain, turn by turn in text: for environments that other trainers step.

Training and evaluation here work on token ids (`sg_rlhf.tasks.search.dialogue`); an environment's
client sends text and counts its own tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sg_rlhf.tasks.grade import Grade, Grader


@dataclass(frozen=True)
class Reply:
    """The answer to one turn of the model.

    Attributes:
        text: what the model reads next; empty at the end.
        grade: the verdict on the whole episode; None while it goes on.
    """

    text: str = ""
    grade: Grade | None = None


class Episode(Protocol):
    """An episode from its prompt to its grade."""

    @property
    def prompt(self) -> str:
        """What the model reads first."""

    async def step(self, turn: str) -> Reply:
        """Answer what the model wrote. A turn that ends the episode has the grade."""

    async def close(self) -> None:
        """Release what the episode holds."""


class SingleTurn:
    """A prompt, one response, its grade.

    Args:
        row: of a data set: `input` is the prompt, `answer` the reference answer.
        grade: the domain's grader.
    """

    def __init__(self, row: Mapping[str, Any], grade: Grader) -> None:
        self.prompt = str(row["input"])
        self._answer = str(row["answer"])
        self._grade = grade

    async def step(self, turn: str) -> Reply:
        # A grader may take seconds (mathematics): other episodes go on meanwhile.
        return Reply(grade=await asyncio.to_thread(self._grade, turn, self._answer))

    async def close(self) -> None:
        """Nothing to release."""
