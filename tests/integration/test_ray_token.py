"""A Ray that a command starts for itself refuses whoever lacks its token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNER = """
import os, subprocess, sys
from sg_rlhf.ray_session import auth_token as ray_token
ray_token.set_auth_token()
import psutil, ray
from sg_rlhf.ray_session import cluster as ray_cluster
ray_cluster.start(num_cpus=1, object_store_memory=100 * 2**20, log_to_driver=False)
started = psutil.Process().children(recursive=True)
try:
    task = ray.remote(lambda: 6 * 7)
    print("own task", ray.get(task.remote()), flush=True)
    address = ray.get_runtime_context().gcs_address
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    join = f"import ray; ray.init(address={address!r}); print('JOINED')"
    other = subprocess.run(
        [sys.executable, "-c", join], env=clean, capture_output=True, text=True, timeout=1800
    )
    print("stranger", other.returncode, "JOINED" in other.stdout, flush=True)
finally:
    ray.shutdown()
    ray_cluster.end(started, 5.0)
"""


@pytest.mark.full
def test_a_stranger_cannot_join() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    found = subprocess.run(
        [sys.executable, "-c", OWNER], env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert found.stdout.splitlines()[-2:] == ["own task 42", "stranger 1 False"], found.stderr
