"""Mathematics: problems whose final answer stands in a box."""

from __future__ import annotations

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade


def grade(response: str, label: str) -> Grade:
    """1 where the last box of the response equals a gold answer of the label, a JSON array, else 0.

    A hostile answer is given up after the grader's limit and counts as wrong (`timeout`, `crash`).
    """
    # Its worker pool takes a while to import, and naming a domain does not need it.
    from sg_rlhf.tasks.math import grading
    from sg_rlhf.tasks.math.data import golds_of

    try:
        golds = golds_of(label)
    except ValueError as error:
        raise ValueError(f"label {error} (the data set's answer field)") from None
    return grading.grade(response, golds)


MATH = Domain(
    name="math",
    title="mathematics with a final answer in a box",
    grade=grade,
    data="sg_rlhf.tasks.math.source:DATA",
    suite="sg_rlhf.tasks.math.suite:SUITE",
    tiny="sg_rlhf.tasks.math.tiny:TINY",
)
