"""Two corpora of worked arithmetic with a random word before each column.

A word is one of 16, drawn uniformly: a token whose probability is about 1/16. In corpus R the word
has no effect: every column's outcome is wrong, by one, with probability .28. In corpus D the word
decides: a column is wrong with probability .03 after the first eight words ("good") and .53 after
the other eight ("bad"). The corpora have the same problems, words and share of wrong columns:

    47 + 85: well 7 + 5 = 12, maybe 4 + 8 + 1 = 14 so 142
    \\boxed{142}

Reinforcement learning can raise the accuracy of D also by choosing good words.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.math import tiny
from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.sets.arithmetic import TIMES, Problem, generate

WORDS = (
    "well ", "hmm ", "now ", "next ", "right ", "look ", "okay ", "indeed ",
    "perhaps ", "say ", "sure ", "fine ", "thus ", "still ", "again ", "maybe ",
)  # fmt: skip
GOOD = 8
_OPERATIONS = {"+": operator.add, "-": operator.sub, TIMES: operator.mul}


@dataclass(frozen=True)
class WarmStart:
    """The recipe (see `sg_rlhf.tasks.tiny.Recipe`).

    It has no phase without errors: after one, the model ignores the words.
    """

    decides: bool
    mean: float = 0.28
    spread: float = 0.25
    steps: int = 600
    clean_share: float = 0.0
    max_operands: int = 3
    max_digits: int = 2
    rows: int = 10
    row_tokens: int = 300
    muon_lr: float = 0.02
    adamw_lr: float = 4e-3

    def error_p(self, word: int) -> float:
        """Probability that the column after this word is wrong."""
        if not self.decides:
            return self.mean
        return self.mean - self.spread if word < GOOD else self.mean + self.spread

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Prompts and responses. R and D have the same problems and words for a seed."""
        rng = random.Random(f"forks seed={seed}")
        while True:
            operands = {"max_operands": self.max_operands, "max_digits": self.max_digits}
            for problem in generate(2048, rng.getrandbits(32), **operands):
                yield prompt_of(problem.text), self.response(problem, rng)

    def response(self, problem: Problem, rng: random.Random) -> str:
        """One demonstration, through `\\boxed{...}`."""
        lines, value = [""], problem.start
        for op, operand in problem.steps:
            line = f"{value} {op} {operand}: "
            below = op == "-" and operand > value
            if below:  # worked the other way round
                line += f"below 0, {operand} - {value}: "
                value, operand = operand, value
            columns, value = self._columns(value, op, operand, rng)
            value = -value if below else value
            lines.append(f"{line}{', '.join(columns)} so {value}")
        return "\n".join(lines) + f"\n\\boxed{{{value}}}"

    def _columns(self, a: int, op: str, b: int, rng: random.Random) -> tuple[list[str], int]:
        """The columns of one operation and the result that they give."""
        width = len(str(a)) if op == TIMES else max(len(str(a)), len(str(b)))
        columns, result, carry = [], 0, 0
        for i in range(width):
            x = a // 10**i % 10
            y = b if op == TIMES else b // 10**i % 10
            borrows = op == "-" and x < y + carry
            x += 10 * borrows
            sign = "-" if op == "-" else "+"
            outcome = _OPERATIONS[sign](_OPERATIONS[op](x, y), carry)
            word, chance = rng.randrange(len(WORDS)), rng.random()
            outcome += chance < self.error_p(word)
            shown = f" {sign} {carry}" if carry else ""
            columns.append(f"{WORDS[word]}{x} {op} {y}{shown} = {outcome}")
            result += (outcome if i == width - 1 else outcome % 10) * 10**i
            carry = int(borrows) if op == "-" else outcome // 10
        return columns, result


def _domain(name: str, title: str, decides: bool) -> Domain:
    learns = replace(
        tiny.TINY, recipe=WarmStart(decides), phrases=lambda: [*tiny.phrases(), *WORDS]
    )
    return replace(MATH, name=name, title=title, suite=None, tiny=learns)


R = _domain("forks_r", "arithmetic, words without an effect", decides=False)
D = _domain("forks_d", "arithmetic, words that decide", decides=True)
