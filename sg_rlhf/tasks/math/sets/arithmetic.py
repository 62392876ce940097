"""Arithmetic problems in words and formulas, made from a seed, with worked solutions.

A problem is a chain of operations on whole numbers, worked from left to right:

    What is $47 + 85 - 36$?                                                                96
    Anna has 24 stamps in each of 7 boxes and gives away 30. How many stamps does ...     138

Problems that differ in the order of summands or factors, in the wording or in the names count as
the same one (`Problem.key`), whose hash decides whether a problem is held out. So problems to
train on and held-out ones never meet, whatever the seeds and counts.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Style = Literal["columns", "guess"]

TIMES = "\\times"
FORMULAS = (
    "What is ${formula}$?",
    "Compute ${formula}$.",
    "Find the value of ${formula}$.",
    "Evaluate the expression ${formula}$.",
)
# A story goes through the operations one by one: what it starts with, and what each one does.
OPENINGS = {"plain": "{name} has {a} {things}", TIMES: " in each of {b} boxes"}
ACTIONS = {"+": "buys {b} more", "-": "gives away {b}"}
QUESTION = ". How many {things} does {name} have now?"
# The only words for an answer below 0.
WEATHER = "The temperature is {a} degrees and {verb} by {b} degrees. What is it now?"
VERBS = {"+": "rises", "-": "falls"}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
THINGS = ("apples", "coins", "stamps", "marbles", "cards", "shells")

MAX_OPERANDS = 3
# One problem in this many is held out.
HELD_OUT_SHARE = 10


@dataclass(frozen=True)
class Problem:
    """One problem: a chain of operations and the text that asks for its value.

    `steps` are ("+", "-" or "\\times", operand), applied to `start` from left to right; a product
    comes first or not at all.
    """

    start: int
    steps: tuple[tuple[str, int], ...]
    text: str

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The value after each step."""
        values = [self.start]
        for op, operand in self.steps:
            values.append(_apply(values[-1], op, operand))
        return tuple(values[1:])

    @property
    def gold(self) -> str:
        """The answer as it stands in `\\boxed{}`."""
        return str(self.values[-1])

    @property
    def key(self) -> str:
        """The same for problems that differ only in order, wording or names."""
        factors = sorted([self.start, *(b for op, b in self.steps if op == TIMES)])
        summands = sorted((op, b) for op, b in self.steps if op != TIMES)
        if len(factors) == 1:
            summands = sorted([("+", self.start), *summands])
            factors = []
        return f"{factors} {summands}"

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the held-out tenth."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def generate(
    count: int, seed: int, *, held_out: bool = False, max_operands: int = 3, max_digits: int = 2
) -> list[Problem]:
    """Draw `count` problems, no two with the same key; the same arguments give the same list.

    Args:
        held_out: draw from the held-out tenth instead of the rest.
        max_operands: 2, or 3 for chains such as `47 + 85 - 36` as well.
        max_digits: of an operand, 1 to 4; the second factor of a product has one.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if not 2 <= max_operands <= MAX_OPERANDS:
        raise ValueError(f"max_operands must be 2 or 3, got {max_operands}")
    if not 1 <= max_digits <= 4:
        raise ValueError(f"max_digits must be 1 to 4, got {max_digits}")
    rng = random.Random(f"arithmetic seed={seed} held_out={held_out}")
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < count:
        problem = _draw(rng, max_operands, max_digits)
        if problem.held_out != held_out or problem.key in found:
            misses += 1
            # Nine draws of ten are on the wrong side anyway where held-out ones are wanted.
            if misses > 1000 + 50 * count:
                raise ValueError(
                    f"count={count}: found only {len(found)} different problems with "
                    f"max_operands={max_operands} max_digits={max_digits} held_out={held_out}"
                )
            continue
        found[problem.key] = problem
    return list(found.values())


def trace(
    problem: Problem, rng: random.Random, style: Style = "columns", slip_p: float = 0.0
) -> str:
    """One demonstration: the response text, through `\\boxed{...}`.

    Style "columns" works one operation a line, digit by digit from the right, with the carry or the
    borrow as a third term; a difference below 0 is worked the other way round:

        47 + 85: 7 + 5 = 12, 4 + 8 + 1 = 13 so 132
        132 - 36: 12 - 6 = 6, 13 - 3 - 1 = 9, 1 - 0 - 1 = 0 so 96
        \\boxed{96}

    Style "guess" is `I guess` and a random answer with the gold's sign and number of digits.

    Args:
        slip_p: probability of forgetting each carry and borrow; the work goes on from there.
    """
    if style not in ("columns", "guess"):
        raise ValueError(f"style must be 'columns' or 'guess', got {style!r}")
    if not 0.0 <= slip_p <= 1.0:
        raise ValueError(f"slip_p must be in [0, 1], got {slip_p}")
    if style == "guess":
        gold = problem.values[-1]
        digits = len(str(abs(gold)))
        guess = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        return f"\nI guess \\boxed{{{-guess if gold < 0 else guess}}}"
    lines = [""]
    value = problem.start
    for op, operand in problem.steps:
        line = f"{value} {op} {operand}: "
        sign = 1
        if op == "-" and operand > value:
            value, operand, sign = operand, value, -1
            line += f"below 0, {value} - {operand}: "
        columns, value = _work(value, op, operand, rng, slip_p)
        value *= sign
        lines.append(f"{line}{', '.join(columns)} so {value}")
    return "\n".join(lines) + f"\n\\boxed{{{value}}}"


def _apply(a: int, op: str, b: int) -> int:
    if op == TIMES:
        return a * b
    return a + b if op == "+" else a - b


def _draw(rng: random.Random, max_operands: int, max_digits: int) -> Problem:
    def operand() -> int:
        return rng.randrange(2, 10 ** rng.randint(1, max_digits))

    n_steps = rng.randint(1, max_operands - 1)
    while True:
        value = start = operand()
        steps: list[tuple[str, int]] = []
        for i in range(n_steps):
            op = rng.choice(("+", "-", TIMES) if i == 0 else ("+", "-"))
            b = rng.randrange(2, 10) if op == TIMES else operand()
            steps.append((op, b))
            value = _apply(value, op, b)
            if value < 0 and i < n_steps - 1:
                break
        else:
            return Problem(start, tuple(steps), _text(rng, start, tuple(steps), value))


def _text(rng: random.Random, start: int, steps: tuple[tuple[str, int], ...], value: int) -> str:
    formula = " ".join([str(start), *(f"{op} {b}" for op, b in steps)])
    as_formula = rng.choice(FORMULAS).format(formula=formula)
    (op, b), *rest = steps
    in_words = [as_formula]
    if not rest and op != TIMES:
        in_words.append(WEATHER.format(a=start, b=b, verb=VERBS[op]))
    if value >= 0:
        in_words.append(_story(rng, start, steps))
    return rng.choice(in_words)


def _story(rng: random.Random, start: int, steps: tuple[tuple[str, int], ...]) -> str:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    story = OPENINGS["plain"].format(name=name, a=start, things=things)
    if steps[0][0] == TIMES:
        story += OPENINGS[TIMES].format(b=steps[0][1])
        steps = steps[1:]
    deeds = [ACTIONS[op].format(b=b) for op, b in steps]
    story += "".join(f", {deed}" for deed in deeds[:-1]) + "".join(f" and {d}" for d in deeds[-1:])
    return story + QUESTION.format(name=name, things=things)


def _work(a: int, op: str, b: int, rng: random.Random, slip_p: float) -> tuple[list[str], int]:
    """The columns of one operation, and the result that they give; a - b needs a >= b."""
    a_digits, b_digits = (tuple(map(int, reversed(str(number)))) for number in (a, b))
    # A product has its second factor in every column.
    width = len(a_digits) if op == TIMES else max(len(a_digits), len(b_digits))
    columns, result, carry = [], 0, 0
    for i in range(width):
        x = a_digits[i] if i < len(a_digits) else 0
        y = b if op == TIMES else (b_digits[i] if i < len(b_digits) else 0)
        borrows = op == "-" and x - y - carry < 0
        if borrows:
            x += 10
        rest = "" if carry == 0 else f" {'-' if op == '-' else '+'} {carry}"
        outcome = _apply(x, op, y) + (-carry if op == "-" else carry)
        columns.append(f"{x} {op} {y}{rest} = {outcome}")
        last = i == width - 1
        result += (outcome if last else outcome % 10) * 10**i
        carry = int(borrows) if op == "-" else outcome // 10
        if carry and slip_p > 0.0 and rng.random() < slip_p:
            carry = 0
    return columns, result
