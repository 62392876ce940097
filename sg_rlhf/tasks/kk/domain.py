"""Knights & Knaves: logic puzzles with exactly one solution (Logic-RL, arXiv 2502.14768)."""

from __future__ import annotations

from functools import partial

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.kk.grading import score

KK = Domain(
    name="kk",
    title="Knights & Knaves logic puzzles",
    grade=score,
    data="sg_rlhf.tasks.kk.source:DATA",
    suite="sg_rlhf.tasks.kk.suite:SUITE",
    tiny="sg_rlhf.tasks.kk.tiny:TINY",
    graders={
        "strict": partial(score, reading="strict"),
        # The totals of the paper's Table 5.
        "table5": partial(score, scheme="table5"),
    },
    source_titles={r"kk_(\d+)ppl": r"\1 people"},
)
