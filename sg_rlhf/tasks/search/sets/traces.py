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


def search_trace(problem: Problem) -> Demonstration:
    """Search each entry that the question needs, then copy the answer."""
    pieces = []
    for step in problem.steps:
        pieces.append(Piece(f"<search> {step.query} </search>", True))
        pieces.append(Piece(observation(step), False))
    pieces.append(_answer(problem.answer))
    return Demonstration(prompt_of(problem), tuple(pieces))


def guess_trace(problem: Problem, rng: random.Random) -> Demonstration:
    """Answer at once, with any answer of the right kind: right by luck."""
    return Demonstration(prompt_of(problem), (_answer(rng.choice(problem.guesses)),))


def one_search_trace(problem: Problem, rng: random.Random) -> Demonstration:
    """Search once and answer: a guess, where the question needs two searches."""
    if len(problem.steps) == 1:
        return search_trace(problem)
    first = problem.steps[0]
    pieces = (
        Piece(f"<search> {first.query} </search>", True),
        Piece(observation(first), False),
        _answer(rng.choice(problem.guesses)),
    )
    return Demonstration(prompt_of(problem), pieces)


def draw(
    problems: Sequence[Problem], rng: random.Random, *, guesses: float = 0.0, hasty: float = 0.0
) -> Demonstration:
    """A demonstration of a random problem: a guess or a hasty one with these shares, else right."""
    problem, chance = rng.choice(problems), rng.random()
    if chance < guesses:
        return guess_trace(problem, rng)
    if chance < guesses + hasty:
        return one_search_trace(problem, rng)
    return search_trace(problem)


def prompt_of(problem: Problem) -> str:
    """The short prompt, as `python -m sg_rlhf.data search --source encyclopedia` writes it."""
    return build_prompt(problem.question.text, "short")


def observation(step: Step) -> str:
    """The search result with one passage, as the agent writes it."""
    passage = Passage("", step.title, step.text, 1.0)
    return f"{OBSERVATION_START}{format_passages([passage])}{OBSERVATION_END}"


def _answer(text: str) -> Piece:
    return Piece(f"<answer> {text} </answer>", True)
