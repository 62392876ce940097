"""A stage that starts a process, checks one thing and never ends; SIGTERM does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record.figure("pids", [os.getpid(), child.pid])
    record.check("before it hung", True)
    time.sleep(600)
