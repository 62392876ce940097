"""A stage that cannot run here."""

from __future__ import annotations

from tests.gpu.result import Job, Record, StageSkippedError


def run(record: Record, job: Job) -> None:
    raise StageSkippedError("its model is out of reach")
