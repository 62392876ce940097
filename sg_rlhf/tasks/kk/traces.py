"""Chain-of-thought traces that warm-start a small model on Knights & Knaves.

The response starts right behind the prompt's `<think>`. Style "search" tries assignments in the
fixed order of `itertools.product((knight, knave), repeat=n)`, one line each:

    Try Luke=knight Ethan=knight Luke: Ethan is a knave F no
    Try Luke=knight Ethan=knave Luke: Ethan is a knave T ok Ethan: Luke is a knave F ok</think>...

A line has T or F behind every simple part of a claim, and "ok" iff the claim's truth fits the
speaker. It ends at its first "no", and the trace at the first line without one. The answer is
written as in the data. Style "guess" is the word `Guess` and a random answer. With flipped verdicts
it gives a well-formed but often wrong model, which reinforcement learning can improve.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal

from sg_rlhf.tasks.kk.logic import Assignment, Statement, evaluate
from sg_rlhf.tasks.kk.puzzle import Puzzle
from sg_rlhf.tasks.kk.render import render_answer, render_claim, role

Style = Literal["search", "guess"]


def trace(
    puzzle: Puzzle, rng: random.Random, style: Style = "search", flip_verdict_p: float = 0.0
) -> str:
    """One demonstration: the response text, through `</answer>`.

    Args:
        rng: source of the guesses and flips; not used by a search without flips.
        flip_verdict_p: probability of writing the opposite of each ok/no. The trace goes on as if
            that were true; if no assignment is left, it ends with `Guess` and a random answer.
    """
    if style not in ("search", "guess"):
        raise ValueError(f"style must be 'search' or 'guess', got {style!r}")
    if not 0.0 <= flip_verdict_p <= 1.0:
        raise ValueError(f"flip_verdict_p must be in [0, 1], got {flip_verdict_p}")
    lines: list[str] = []
    if style == "search":
        for assignment in itertools.product((True, False), repeat=puzzle.n_people):
            line, consistent = _try(puzzle, assignment, rng, flip_verdict_p)
            lines.append(line)
            if consistent:
                return _finish(puzzle, lines, assignment)
    lines.append("Guess")
    return _finish(puzzle, lines, tuple(rng.random() < 0.5 for _ in puzzle.names))


def _try(puzzle: Puzzle, assignment: Assignment, rng: random.Random, p: float) -> tuple[str, bool]:
    def truth(statement: Statement) -> str:
        return " T" if evaluate(statement, assignment) else " F"

    who = zip(puzzle.names, assignment, strict=True)
    words = ["Try", *(f"{name}={role(knight)}" for name, knight in who)]
    said = zip(puzzle.names, puzzle.statements, assignment, strict=True)
    for name, statement, knight in said:
        fits = evaluate(statement, assignment) == knight
        if p > 0.0 and rng.random() < p:
            fits = not fits
        words.append(f"{name}: {render_claim(statement, puzzle.names, truth)}")
        words.append("ok" if fits else "no")
        if not fits:
            return " ".join(words), False
    return " ".join(words), True


def _finish(puzzle: Puzzle, lines: list[str], answer: Assignment) -> str:
    text = render_answer(puzzle.names, answer)
    return "\n".join(lines) + f"</think><answer>{text}</answer>"
