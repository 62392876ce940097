"""Case resume: a run on two devices is killed, and goes on on one from its checkpoint."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import psutil

from sg_rlhf.overlay.checkpoints import paths
from sg_rlhf.ray_session import cluster
from sg_rlhf.run_dir import jsonl_log
from tests.gpu import random_pipeline, training_run
from tests.gpu.launch import ROOT
from tests.gpu.result import Job, Record
from tests.software_gpu.cases import colocated

POLL_SECONDS = 0.5


def run(record: Record, job: Job) -> None:
    """Two devices until the first checkpoint; SIGKILL; one device until the end."""
    job = dataclasses.replace(job, overrides=(*colocated(2, 2), "ckpt.save_steps=1"))
    _, (configs, overrides) = random_pipeline.settings(job)
    run_dir = job.scratch / "run"
    command = [sys.executable, *training_run.train_arguments(configs, overrides, run_dir)]
    process = subprocess.Popen(command, cwd=ROOT)
    checkpoints = run_dir / "checkpoints" / "deepspeed" / "_actor"
    while process.poll() is None and not paths.resume_candidates(checkpoints):
        time.sleep(POLL_SECONDS)
    if process.poll() is not None:
        raise RuntimeError(f"the run on two devices ended with status {process.returncode}")
    _kill(process)
    before = jsonl_log.read(run_dir / jsonl_log.METRICS)
    found = paths.resume_candidates(checkpoints)
    record.figure("checkpoints of the killed run", found)

    os.environ["SOFTWARE_GPU_COUNT"] = "1"
    training_run.train(configs, [*overrides, *colocated(1, 1)], run_dir)
    training_run.check_run(record, run_dir, random_pipeline.ROLLOUTS)
    after = jsonl_log.read(run_dir / jsonl_log.METRICS)
    step = int(found[0].removeprefix("global_step"))
    record.check("it went on from the checkpoint", after[:step] == before[:step], step)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The run with all that it started, at once."""
    driver = psutil.Process(process.pid)
    started = [*driver.children(recursive=True), driver]
    cluster.kill_all(started, grace_seconds=0.0)
    psutil.wait_procs(started, timeout=300)
    process.wait()
