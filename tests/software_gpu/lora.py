"""Case lora: only the adapters train, and the engine samples with them."""

from __future__ import annotations

import dataclasses

import torch
from safetensors import safe_open

from tests.gpu import random_pipeline, training_run
from tests.gpu.result import Job, Record


def run(record: Record, job: Job) -> None:
    """The pipeline with adapters of rank 4; the run leaves an adapter."""
    job = dataclasses.replace(job, overrides=(*job.overrides, "ds.lora.rank=4"))
    _, arguments = random_pipeline.settings(job)
    run_dir = job.scratch / "run"
    training_run.train(*arguments, run_dir)
    training_run.check_run(record, run_dir, random_pipeline.ROLLOUTS)
    (file,) = training_run.trained_model(run_dir).glob("adapter_model.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    # A matrix B begins as zeros.
    second = {name: value for name, value in tensors.items() if "lora_B" in name}
    untrained = [name for name, value in second.items() if not torch.any(value)]
    record.figure("adapter tensors", len(tensors))
    record.check("every adapter has trained", bool(second) and not untrained, untrained[:5])
