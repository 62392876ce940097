"""Waiting for machines of a Ray cluster, as the job files for several of them do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray

from sg_rlhf.ray_session import cluster
from tests.integration.conftest import ROOT, environment


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray of one machine."""
    cluster.start(num_cpus=1, num_gpus=0, object_store_memory=100 * 2**20)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def awaited(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sg_rlhf.launch.await_nodes", *words],
        env={**environment(), "RAY_AUTH_MODE": "token"},  # as a local Ray has it by default
        cwd=ROOT, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


def test_machines_that_are_there_and_one_that_is_not(address: str) -> None:
    done = awaited("--address", address, "--nodes", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Ray at {address}: 1 machines: ")
    missing = awaited("--address", address, "--nodes", "2", "--seconds", "3")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.splitlines()[-1].startswith(
        f"error: Ray at {address}: 1 of 2 machines after 3 s: "
    )


def test_a_head_that_is_not_there() -> None:
    done = awaited("--address", "127.0.0.1:1", "--nodes", "2", "--seconds", "3")
    assert done.returncode == 1
    assert "0 of 2 machines after 3 s: none; " in done.stderr
    without = awaited("--nodes", "2")
    assert without.returncode == 2 and "RAY_ADDRESS is not set" in without.stderr
