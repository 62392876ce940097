"""A stage whose process is killed from within, as by a fault in a library."""

from __future__ import annotations

import os
import signal

from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    record.within("before it crashed", 1.0, 2.0)
    os.kill(os.getpid(), signal.SIGSEGV)
