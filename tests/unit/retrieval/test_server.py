"""The server's start, and threads that sleep while they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sg_rlhf.retrieval import replicas, server
from sg_rlhf.retrieval.search import Retriever

# -- What a server says of where it listens and of what it runs on, and how replicas are described


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_the_loopback_has_no_remark(host: str) -> None:
    assert server.exposure(host) == ""


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::1a", "10.0.0.1", "localhost.invalid", "127.evil.invalid", ""]
)
def test_what_only_looks_like_the_loopback_has_a_remark(host: str) -> None:
    assert "not the loopback" in server.exposure(host)


def opened(error: Exception | None = None) -> Retriever:
    if error is not None:
        raise error
    return Retriever(None, None, f"opened by {os.getpid()}")  # type: ignore[arg-type]


def killed() -> Retriever:
    os.kill(os.getpid(), 9)
    raise AssertionError


def test_the_process_that_starts_replicas_opens_no_index_itself() -> None:
    said = replicas.describe(opened)
    assert said.startswith("opened by ") and said != f"opened by {os.getpid()}"
    # It has ended, and with it goes what it held.
    assert not Path(f"/proc/{said.split()[-1]}").exists()


def test_what_is_wrong_with_an_index_is_said_before_replicas_start() -> None:
    with pytest.raises(ValueError, match="no such folder"):
        replicas.describe(partial(opened, ValueError("--index /no/such: no such folder")))
    with pytest.raises(ValueError, match="was killed meanwhile"):
        replicas.describe(killed)


# -- Threads of torch and faiss in the retriever's commands --------------------------------------


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
