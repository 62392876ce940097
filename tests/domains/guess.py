"""A domain of several turns in one file: guess a letter, hear whether it comes earlier or later.

`train.agent_func_path: domain:tests.domains.guess:GUESS` trains on it, and
`python -m eval.run --suite tests.domains.guess:GUESS` evaluates.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sg_rlhf.tasks.data_source import Generator, generated_records
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import Question, Source, generated_source
from sg_rlhf.tasks.rollout import Codec, Environment, Reply, Turn
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, one_by_one

LETTERS = "abcdefgh"
GUESSES = 3
PROMPT = f"Guess one of {' '.join(LETTERS)}\nGuess:"


class GuessEnvironment(Environment):
    """Answers each guess."""

    stop = ("\n",)
    turn_tokens = 8

    def begin(self, row: Mapping[str, Any], codec: Codec) -> GuessEpisode:
        return GuessEpisode(str(row["answer"]))


@dataclass
class GuessEpisode:
    answer: str
    guesses: list[str] = field(default_factory=list)

    async def step(self, turn: Turn) -> Reply:
        found = re.search(rf"[{LETTERS}]", turn.text)
        self.guesses.append(found[0] if found else "?")
        if self.guesses[-1] == self.answer or len(self.guesses) == GUESSES:
            return Reply(done=True, truncated=self.guesses[-1] != self.answer)
        return Reply("later\nGuess:" if self.guesses[-1] < self.answer else "earlier\nGuess:")

    def grade(self) -> Grade:
        correct = self.answer in self.guesses
        return Grade(
            reward=float(correct),
            correct=correct,
            reason="correct" if correct else "wrong",
            extracted=self.guesses[-1] if self.guesses else None,
            format_ok="?" not in self.guesses,
            logs={"guesses": float(len(self.guesses))},
        )


def grade(response: str, label: str) -> Grade:
    """The same of a response without an environment: one guess."""
    correct = response.strip() == label
    return Grade(float(correct), correct, "correct" if correct else "wrong", response.strip())


def generate(
    count: int, test_count: int, seed: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Any]]:
    rng = random.Random(seed)

    def draw(number: int) -> list[Mapping[str, Any]]:
        fixed = {"input": PROMPT, "datasource": "guess"}
        return [{**fixed, "answer": rng.choice(LETTERS)} for _ in range(number)]

    return draw(count), draw(test_count), {}


def questions(_folder: Path | None) -> tuple[list[Question], list[Source]]:
    found = [Question(f"guess-{letter}", PROMPT, letter) for letter in LETTERS]
    return found, [generated_source("letters", found)]


GUESS = Domain(
    name="guess",
    title="a letter to guess in three turns",
    grade=grade,
    environment=GuessEnvironment,
    data=generated_records(
        "Letters to guess, generated.",
        Generator("letters", {"count": 64, "test_count": 16, "seed": 0}, generate),
    ),
    suite=Suite(
        "guess",
        "Guess",
        (
            Benchmark(
                name="guess",
                family="guess",
                title="guessed within three turns, greedy",
                size=len(LETTERS),
                settings=Sampling(temperature=0.0, max_tokens=64),
                load=questions,
                grade=one_by_one(grade),
                licence="ours",
            ),
        ),
    ),
)
