"""Sums of two numbers as messages, with or without shown examples, made from a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sg_rlhf.data_io.dataset_writer import Records
from sg_rlhf.tasks.data_source import Generator, generated_records

_HELP = """\
Make sums for a small instruct model: rows of messages, written with the model's chat template.

A fifth of the sums is held out for test.jsonl. Training rows and shown examples never have one.

examples:
  # data of configs/arithmetic/grpo_smollm2-135m_cpu.yaml
  sg-rlhf data arithmetic --out data/arithmetic
  # harder: two numbers up to 99, without shown examples
  sg-rlhf data arithmetic --out data/sums --generate second=99 shown=0

keys of --generate (defaults in brackets):
  count         rows to train on; sums may repeat                      [160]
  test_count    held-out sums, each once                               [64]
  seed          the same seed gives the same files                     [0]
  first         largest first number, 9 to 9999                        [49]
  second        largest second number, 9 to 9999                       [9]
  shown         solved sums before the question, 0 to 8                [2]
  form          of their answers: number (12) or equation (7 + 5 = 12)     [equation]

Without shown examples the question asks for the number only. Training needs
data.apply_chat_template=true.
"""
#: One sum in this many is held out.
HELD_OUT_SHARE = 5
QUESTION = "What is {a} + {b}?"
#: Form of a shown answer -> its text.
FORMS = {"number": "{sum}", "equation": "{a} + {b} = {sum}"}
#: Stands before the question where no example shows the form of an answer.
ASK_FOR_NUMBER = "Answer with the number only. "


@dataclass(frozen=True)
class Sum:
    """Two numbers to add."""

    a: int
    b: int

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the held-out fifth; the order of the numbers does not matter."""
        key = f"{min(self.a, self.b)} {max(self.a, self.b)}"
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0

    @property
    def carries(self) -> bool:
        """Whether a column of the written sum gives 10 or more."""
        a, b = str(self.a)[::-1], str(self.b)[::-1]
        return any(int(x) + int(y) >= 10 for x, y in zip(a, b, strict=False))


def messages(question: Sum, shown: list[Sum], form: str) -> list[dict[str, str]]:
    """The conversation up to the question: the user asks, the assistant answers in this form."""
    turns = []
    for example in shown:
        turns += [
            {"role": "user", "content": QUESTION.format(a=example.a, b=example.b)},
            {
                "role": "assistant",
                "content": FORMS[form].format(a=example.a, b=example.b, sum=example.answer),
            },
        ]
    text = ("" if shown else ASK_FOR_NUMBER) + QUESTION.format(a=question.a, b=question.b)
    return [*turns, {"role": "user", "content": text}]


def generate(
    count: int, test_count: int, seed: int, first: int, second: int, shown: int, form: str
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Records]]:
    """Training rows and held-out rows; `--help` describes the keys."""
    for key, value in (("count", count), ("test_count", test_count)):
        if value < 0:
            raise ValueError(f"{key}={value}: expected 0 or more")
    for key, value in (("first", first), ("second", second)):
        if not 9 <= value <= 9999:
            raise ValueError(f"{key}={value}: expected 9 to 9999")
    if not 0 <= shown <= 8:
        raise ValueError(f"shown={shown}: expected 0 to 8")
    if form not in FORMS:
        raise ValueError(f"form={form}: expected one of {', '.join(FORMS)}")
    rng = random.Random(f"sums seed={seed}")

    def draw(other_than: Sum | None = None) -> Sum:
        while True:
            found = Sum(rng.randint(2, first), rng.randint(2, second))
            if not found.held_out and found != other_than:
                return found

    def record(question: Sum) -> Mapping[str, Any]:
        return {
            "input": messages(question, [draw(question) for _ in range(shown)], form),
            "answer": question.answer,
            "datasource": "sums_carry" if question.carries else "sums_no_carry",
        }

    train = [record(draw()) for _ in range(count)]
    pairs = ((a, b) for a in range(2, first + 1) for b in range(2, second + 1))
    held_out = [pair for a, b in pairs if (pair := Sum(a, b)).held_out]
    if len(held_out) < test_count:
        raise ValueError(
            f"test_count={test_count}: only {len(held_out)} held-out sums up to {first} + {second}"
        )
    test = [record(question) for question in rng.sample(held_out, test_count)]
    return train, test, {}


DATA = generated_records(
    _HELP,
    Generator(
        "sums",
        {
            "count": 160,
            "test_count": 64,
            "seed": 0,
            "first": 49,
            "second": 9,
            "shown": 2,
            "form": "equation",
        },
        generate,
    ),
)
