"""A stage that cannot go on."""

from __future__ import annotations

from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    record.check("before it raised", True)
    raise ValueError("no such\nmodel")
