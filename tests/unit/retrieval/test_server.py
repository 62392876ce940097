"""Threads of torch and faiss in the retriever's commands sleep while they wait."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from sg_rlhf.retrieval import index, server, verify
from sg_rlhf.retrieval.command import run
assert not {"torch", "faiss"} & set(sys.modules), "loaded before the setting can be read"
def load():
    import faiss, torch
sys.exit(run("retriever", load))
"""


def test_threads_sleep_while_they_wait() -> None:
    """As the OpenMP libraries themselves say, each when it is loaded."""
    # vLLM, in an earlier test of this process, has every process after it load OpenMP at its start.
    unset = ("OMP_WAIT_POLICY", "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, text=True, capture_output=True, check=True
    )
    said = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert said
    assert all("'0'" in line for line in said)
