"""A whole domain outside the package: letters to write in the reverse order.

`SG_DOMAINS=tests.domains.reverse.domain:REVERSE` makes it one of the domains of every command.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.settings import DomainSettings
from sg_rlhf.tasks.tiny import EOS

LETTERS = "abcdefgh"
SIZES = (3, 4, 5)


class ReverseSettings(DomainSettings):
    """The recipe's `sg.reverse.*`."""

    section: ClassVar[str] = "reverse"

    partial_credit: bool = Field(False, description="reward the share of letters in their place")


@dataclass(frozen=True)
class Row:
    """Letters, each once."""

    letters: str

    @property
    def prompt(self) -> str:
        return f"Reverse: {' '.join(self.letters)} ="

    @property
    def answer(self) -> str:
        return " ".join(reversed(self.letters))

    @property
    def held_out(self) -> bool:
        """Of a tenth of all rows, which nothing is trained on."""
        return sum(i * ord(letter) for i, letter in enumerate(self.letters)) % 10 == 0


def rows(count: int, seed: int, *, held_out: bool) -> list[Row]:
    """Different rows, all sizes about equally often."""
    rng = random.Random(f"reverse {seed} {held_out}")
    found: dict[Row, None] = {}
    while len(found) < count:
        row = Row("".join(rng.sample(LETTERS, rng.choice(SIZES))))
        if row.held_out == held_out:
            found[row] = None
    return list(found)


def grade(response: str, label: str) -> Grade:
    """1 for the letters in the reverse order; less, as the settings say, for some in place."""
    text = response.removesuffix(EOS).strip()
    answer = text if re.fullmatch(rf"[{LETTERS}]( [{LETTERS}])*", text) else None
    in_place = _share(answer.split(), label.split()) if answer else 0.0
    correct = answer == label
    partial = ReverseSettings.from_environment().partial_credit
    return Grade(
        reward=in_place if partial else float(correct),
        correct=correct,
        reason="correct" if correct else "wrong" if answer else "unreadable",
        extracted=answer,
        format_ok=answer is not None,
        logs={"in_place": in_place},
    )


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    pairs = zip(found, wanted, strict=False)
    return sum(a == b for a, b in pairs) / max(len(found), len(wanted))


REVERSE = Domain(
    name="reverse",
    title="letters to write in the reverse order",
    grade=grade,
    prompt_end=" =",
    data="tests.domains.reverse.data:COMMAND",
    settings=ReverseSettings,
    suite="tests.domains.reverse.suite:SUITE",
    tiny="tests.domains.reverse.tiny:TINY",
    source_titles={r"reverse_(\d)": r"\1 letters"},
)
