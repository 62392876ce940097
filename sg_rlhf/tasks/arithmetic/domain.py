"""Sums in chat form for a small instruct model: the last number of the response is the answer."""

from __future__ import annotations

import re

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def grade(response: str, label: str) -> Grade:
    """1 where the last number of the response is the label, else 0; "7 + 5 = 12." counts for 12."""
    numbers = _NUMBER.findall(response)
    answer = numbers[-1] if numbers else None
    correct = answer == label
    reason = "no_number" if answer is None else "correct" if correct else "wrong"
    return Grade(float(correct), correct, reason, answer, format_ok=answer is not None)


ARITHMETIC = Domain(
    name="arithmetic",
    title="sums with a plain answer, for a small instruct model",
    grade=grade,
    data="sg_rlhf.tasks.arithmetic.data:DATA",
    suite="sg_rlhf.tasks.arithmetic.suite:SUITE",
    source_titles={"sums_carry": "sums that carry", "sums_no_carry": "sums that carry nothing"},
)
