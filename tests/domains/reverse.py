"""A whole domain in one file outside the package: letters to write in the reverse order.

`SG_DOMAINS=tests.domains.reverse:REVERSE` makes it one of the domains of every command.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sg_rlhf.tasks.data_source import Generator, generated_records
from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.questions import Question, Source, generated_source
from sg_rlhf.tasks.settings import DomainSettings
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, one_by_one
from sg_rlhf.tasks.tiny import EOS, TinyModel

LETTERS = "abcdefgh"
SIZES = (3, 4, 5)


# -- the problem: row, prompt, answer, grade ----------------------------------------------------


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

    def record(self) -> dict[str, Any]:
        source = f"reverse_{len(self.letters)}"
        return {"input": self.prompt, "answer": self.answer, "datasource": source}


def draw(rng: random.Random) -> Row:
    return Row("".join(rng.sample(LETTERS, rng.choice(SIZES))))


def rows(count: int, seed: int, *, held_out: bool) -> list[Row]:
    """Different rows, all sizes about equally often."""
    rng = random.Random(f"reverse {seed} {held_out}")
    found: dict[Row, None] = {}
    while len(found) < count:
        row = draw(rng)
        if row.held_out == held_out:
            found[row] = None
    return list(found)


class ReverseSettings(DomainSettings):
    """The recipe's `sg.reverse.*`."""

    section: ClassVar[str] = "reverse"

    partial_credit: bool = Field(False, description="reward the share of letters in their place")


def grade(response: str, label: str) -> Grade:
    """1 for the letters in the reverse order; less, as the settings say, for some in place."""
    text = response.removesuffix(EOS).strip()
    answer = text if re.fullmatch(rf"[{LETTERS}]( [{LETTERS}])*", text) else None
    found, wanted = (answer or "").split(), label.split()
    pairs = zip(found, wanted, strict=False)
    in_place = sum(a == b for a, b in pairs) / max(len(found), len(wanted))
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


# -- its data, evaluation and tiny model --------------------------------------------------------


def generate(
    count: int, test_count: int, seed: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Any]]:
    train, test = rows(count, seed, held_out=False), rows(test_count, seed, held_out=True)
    return [row.record() for row in train], [row.record() for row in test], {}


def questions(_folder: Path | None) -> tuple[list[Question], list[Source]]:
    found = [
        Question(f"reverse-{number}", row.prompt, row.answer, str(len(row.letters)))
        for number, row in enumerate(rows(24, 1, held_out=True))
    ]
    return found, [generated_source("generated seed=1", found)]


@dataclass(frozen=True)
class WarmStart:
    """The tiny model's demonstrations: right answers, then mostly random ones."""

    steps: int = 40
    clean_share: float = 0.5
    guess_share: float = 0.5
    rows: int = 8
    row_tokens: int = 64
    muon_lr: float = 0.02
    adamw_lr: float = 4e-3

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Rows that are not held out, with their answers or random ones."""
        rng = random.Random(f"reverse demonstrations {seed} {clean}")
        while True:
            row = draw(rng)
            if row.held_out:
                continue
            answer = row.answer.split()
            if not clean and rng.random() < self.guess_share:
                rng.shuffle(answer)
            yield row.prompt, " " + " ".join(answer)


REVERSE = Domain(
    name="reverse",
    title="letters to write in the reverse order",
    grade=grade,
    settings=ReverseSettings,
    data=generated_records(
        "Letters to write in the reverse order, generated.",
        Generator("letters", {"count": 64, "test_count": 16, "seed": 0}, generate),
    ),
    suite=Suite(
        "reverse",
        "Reverse",
        (
            Benchmark(
                name="reverse",
                family="reverse",
                title="letters in the reverse order, greedy",
                size=24,
                settings=Sampling(temperature=0.0, max_tokens=16),
                load=questions,
                grade=one_by_one(grade),
                licence="ours",
            ),
        ),
    ),
    tiny=TinyModel(
        what="reversal",
        items="rows",
        recipe=WarmStart(),
        phrases=lambda: ["Reverse:", " =", *(f" {letter}" for letter in LETTERS)],
        held_out=lambda recipe: rows(48, 0, held_out=True),
        prompt=lambda row: row.prompt,
        grade=lambda response, row: grade(response, row.answer),
        group=lambda row: f"{len(row.letters)}_letters",
        guess="?",
        max_new_tokens=12,
    ),
    source_titles={r"reverse_(\d)": r"\1 letters"},
)
