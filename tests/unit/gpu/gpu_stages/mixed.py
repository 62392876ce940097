"""A stage with one check of each kind."""

from __future__ import annotations

from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    record.check("holds", True)
    record.within("within", 0.5, 1.0)
    record.within("beyond", float("nan"), 1.0, "the worst case")
    record.goal("goal", 3.0, 2.0)
    record.skip("left out", "the reason")
    record.figure("figure", {"ms": 1.5})
