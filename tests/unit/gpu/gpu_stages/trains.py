"""A stage whose training run fails."""

from __future__ import annotations

from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    logs = job.scratch / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "failure.log").write_text("out of memory\n")
    (job.scratch / "run" / "checkpoints").mkdir()
    raise RuntimeError("-m sg_rlhf.train ended with status 1")
