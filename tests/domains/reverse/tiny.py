"""A tiny model for it, warm-started in seconds: `python -m sg_rlhf.tiny.build --domain reverse`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sg_rlhf.tasks.tiny import TinyModel
from tests.domains.reverse.domain import LETTERS, SIZES, Row, grade, rows


@dataclass(frozen=True)
class WarmStart:
    """The recipe (see `tasks.tiny.Recipe`): right answers, then mostly random ones."""

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
            row = Row("".join(rng.sample(LETTERS, rng.choice(SIZES))))
            if row.held_out:
                continue
            answer = row.answer.split()
            if not clean and rng.random() < self.guess_share:
                rng.shuffle(answer)
            yield row.prompt, " " + " ".join(answer)


TINY = TinyModel(
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
)
