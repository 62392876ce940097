"""Search dialogues to warm-start a tiny model on: right ones, and ones with its later bad habits.

A demonstration is a prompt and pieces of a response, each marked as the model's or the search
engine's. Only the model's pieces are to be learnt from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sg_rlhf.tasks.search.prompt import build_prompt
from sg_rlhf.tasks.search.protocol import (
    OBSERVATION_END,
    OBSERVATION_START,
    Passage,
    format_passages,
)
from sg_rlhf.tasks.search.sets.encyclopedia import Problem, Step


@dataclass(frozen=True)
class Piece:
    """A part of a response; `of_model`: the model wrote it, else the search engine did."""

    text: str
    of_model: bool


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the pieces of a whole response."""

    prompt: str
    pieces: tuple[Piece, ...]

    @property
    def response(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def demonstrate(
    problem: Problem, searches: int | None = None, guess: str | None = None
) -> Demonstration:
    """Search the first `searches` entries (None: all), then give the answer or a guess."""
    pieces = []
    for step in problem.steps[:searches]:
        pieces.append(Piece(f"<search> {step.query} </search>", True))
        pieces.append(Piece(observation(step), False))
    answer = problem.answer if guess is None else guess
    pieces.append(Piece(f"<answer> {answer} </answer>", True))
    return Demonstration(prompt_of(problem), tuple(pieces))


def draw(
    problems: Sequence[Problem], rng: random.Random, *, guesses: float = 0.0, hasty: float = 0.0
) -> Demonstration:
    """A demonstration of a random problem.

    `guesses`: share that answers at once, at random. `hasty`: share that searches once and guesses
    where two searches are needed.
    """
    problem, chance = rng.choice(problems), rng.random()
    if chance < guesses:
        return demonstrate(problem, 0, rng.choice(problem.guesses))
    if chance < guesses + hasty and len(problem.steps) > 1:
        return demonstrate(problem, 1, rng.choice(problem.guesses))
    return demonstrate(problem)


def prompt_of(problem: Problem) -> str:
    """The short prompt, as `sg-rlhf data search --source encyclopedia` writes it."""
    return build_prompt(problem.question.text, "short")


def observation(step: Step) -> str:
    """The search result with one passage, as the agent writes it."""
    passage = Passage("", step.title, step.text, 1.0)
    return f"{OBSERVATION_START}{format_passages([passage])}{OBSERVATION_END}"
