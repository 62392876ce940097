"""Arithmetic for the tiny model: phrases, demonstrations, held-out problems, grading."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math import grading
from sg_rlhf.tasks.math.prompt import SUFFIX, prompt_of
from sg_rlhf.tasks.math.sets.arithmetic import (
    ACTIONS,
    FORMULAS,
    NAMES,
    OPENINGS,
    QUESTION,
    THINGS,
    TIMES,
    VERBS,
    WEATHER,
    Problem,
    generate,
    trace,
)
from sg_rlhf.tasks.tiny import MERGE_TEXT, Recipe, TinyModel

# Held out are a tenth of all problems (`Problem.held_out`); these are measured. The data command
# draws its test split from the same tenth.
HELD_OUT = 300
_HELD_OUT_SEED = 0

# Spaces and punctuation around a number belong to the phrases, so that the digits of every number
# are the same ten tokens.
_TRACE_PHRASES = (
    " + ", " - ", f" {TIMES} ", " = ", ", ", ": ", " so ", ": below 0, ",
    "\nI guess \\boxed{", "\n\\boxed{",
)  # fmt: skip


@dataclass(frozen=True)
class ArithmeticWarmStart(Recipe):
    """Work in columns first, then mostly guesses."""

    steps: int = 500
    max_operands: int = 3
    max_digits: int = 2
    guess_share: float = 0.60
    # Of the worked problems: the share with slips, and the probability of a slip at each carry.
    slips_share: float = 1 / 3
    slip_p: float = 0.3

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Prompts and responses, kinds and styles mixed at random."""
        rng = random.Random(f"arithmetic demonstrations seed={seed} clean={clean}")
        guess_share = 0.0 if clean else self.guess_share
        slips_share = 0.0 if clean else self.slips_share
        while True:
            pool = generate(
                2048,
                rng.getrandbits(32),
                max_operands=self.max_operands,
                max_digits=self.max_digits,
            )
            for problem in pool:
                if rng.random() < guess_share:
                    text = trace(problem, rng, "guess")
                else:
                    slips = rng.random() < slips_share
                    text = trace(problem, rng, "columns", self.slip_p if slips else 0.0)
                yield prompt_of(problem.text), text


def held_out_problems(max_operands: int = 3, max_digits: int = 2) -> list[Problem]:
    """Problems that no demonstration has, whatever the order, the wording and the names."""
    return generate(
        HELD_OUT, _HELD_OUT_SEED, held_out=True, max_operands=max_operands, max_digits=max_digits
    )


def phrases() -> list[str]:
    """The fixed pieces of problems and of worked solutions, and the names."""
    templates = [*FORMULAS, *OPENINGS.values(), QUESTION, WEATHER]
    # A deed opens with ", " or " and ", and the number is inside.
    templates += [f"{joint}{deed}" for deed in ACTIONS.values() for joint in (", ", " and ")]
    pieces = [piece for text in templates for piece in re.split(r"{\w+}", text)]
    # In front of a thing stand a number's space or "How many ", behind it " in", "," or " does".
    words = [SUFFIX, *pieces, *VERBS.values(), *NAMES, *THINGS, *_TRACE_PHRASES]
    return [text for text in dict.fromkeys(words) if len(text) > 1]


def grade(response: str, problem: Problem) -> Grade:
    """The training reward's own verdict; well-formed is a whole number in the last box."""
    result = grading.grade(response, problem.gold)
    readable = result.extracted is not None and re.fullmatch(r"-?\d+", result.extracted) is not None
    return replace(result, format_ok=readable)


def _group(problem: Problem) -> str:
    if any(op == TIMES for op, _ in problem.steps):
        return "products"
    return f"{len(problem.steps) + 1}_operands"


TINY = TinyModel(
    what="arithmetic",
    items="problems",
    recipe=ArithmeticWarmStart(),
    phrases=phrases,
    # Without digits no two of them are merged: each is one token.
    merge_text=re.sub(r"\d+ ?", "", MERGE_TEXT),
    held_out=lambda recipe: held_out_problems(recipe.max_operands, recipe.max_digits),
    prompt=lambda problem: prompt_of(problem.text),
    grade=grade,
    group=_group,
    guess="I guess",
    # Longer than any chain of two operations on two-digit numbers.
    max_new_tokens=96,
)
