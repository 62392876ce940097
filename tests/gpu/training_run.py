"""One training run as a user starts it, and what its run directory says: for stages e and f."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sg_rlhf.config import load_config
from sg_rlhf.config.sg_settings import SGSettings
from sg_rlhf.plan.of_recipe import plan_of
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint
from tests.gpu import random_qwen2
from tests.gpu.launch import ROOT
from tests.gpu.result import Job, Record

#: A reward that differs between random texts.
HASH_REWARD = ROOT / "tests" / "gpu" / "reward_by_hash.py"
#: Metric of a rollout: mean of abs(trainer's - engine's log-prob) of its tokens.
MISMATCH = "sg/mismatch_abs_mean"
#: Of it, above which a run warns.
TOLERANCE: float = SGSettings.model_fields["sync_check_tolerance"].default
#: Of the recipe's plan, as well as its seconds.
PREDICTED = ("gpu_memory_gib", "gpu_memory_phase", "policy_allocated_gib", "host_memory_gib")
PHASES = ("generation", "make_experience", "ppo_train", "broadcast", "step_total")


def puzzles(job: Job, people: str, count: int) -> Path:
    """Generated Knights and Knaves puzzles; returns the file."""
    folder = job.scratch / "kk"
    call(
        "-m", "sg_rlhf", "data", "kk", "--out", str(folder), "--generate", f"people={people}",
        f"per_size={count}", "test_per_size=2", "seed=0",
    )  # fmt: skip
    return folder / "train.jsonl"


def random_model(job: Job, published: str) -> Path:
    """A model of a published shape with random weights; returns its folder."""
    folder = job.scratch / "random_qwen2"
    if job.small:
        random_qwen2.write(folder, small=True)
    else:
        call("-m", "tests.gpu.random_qwen2", str(folder), published)
    return folder


#: For a run that learns nothing.
NO_EVALUATION = ("eval.dataset=null", "eval.steps=-1", "sg.eval_at_start=false")


def train(configs: Sequence[str | Path], overrides: Sequence[str], run_dir: Path) -> None:
    """The training command; its output goes to the stage's log.

    Raises:
        RuntimeError: it did not end well.
    """
    call(*train_arguments(configs, overrides, run_dir))


def train_arguments(
    configs: Sequence[str | Path], overrides: Sequence[str], run_dir: Path
) -> list[str]:
    """Of Python, to train."""
    files = [part for config in configs for part in ("--config", str(config))]
    return [
        "-m", "sg_rlhf.train", *files, "--run-dir", str(run_dir),
        "sg.wandb=disabled", "ckpt.save_steps=1000", "ckpt.save_hf=false",
        *overrides,
    ]  # fmt: skip


def call(*arguments: str) -> None:
    """A command of the product; its output goes to the stage's log.

    Raises:
        RuntimeError: it did not end well.
    """
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} ended with status {done.returncode}")


@contextlib.contextmanager
def peak_memory(record: Record, job: Job) -> Iterator[None]:
    """The most that nvidia-smi saw taken of the GPU meanwhile, by all processes."""
    if not job.on_cuda:
        yield
        return
    peak, stop = [0], threading.Event()

    def watch() -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not stop.wait(0.5):
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
                found = subprocess.run(query, capture_output=True, text=True, timeout=300)
                peak[0] = max(peak[0], int(found.stdout.split()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(15.0)
        record.figure("gpu_memory_used_gib", round(peak[0] / 1024, 2))


def check_run(record: Record, run_dir: Path, rollouts: int, mismatch: float = TOLERANCE) -> None:
    """Rollouts, sync checks, finite figures; seconds per phase and memory as figures.

    Args:
        mismatch: largest mean difference of the log-probs of trainer and engine at sampling.
    """
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    record.check("rollouts", len(rows) == rollouts, len(rows), rollouts)
    differences = [row.get("sync/log_prob_diff_mean", math.nan) for row in rows]
    checked = [x for x in differences if math.isfinite(x)]
    record.check("the first weight sync was checked", len(checked) == 1, len(checked), 1)
    # What stops a run is sg.sync_check_tolerance; this is the figure that it looks at.
    record.figure("sync_log_prob_diff_mean", checked)
    # At sampling, after the engine's sleep.
    mismatches = [row.get(MISMATCH, math.nan) for row in rows]
    agree = bool(mismatches) and all(x <= mismatch for x in mismatches)
    record.check("the engine sampled by the trainer's policy", agree, mismatches, mismatch)
    finite = all(
        math.isfinite(row[key]) for row in steps for key in ("actor_grad_norm", "policy_loss")
    )
    record.check("every gradient and loss is finite", bool(steps) and finite, len(steps))
    norms = [row["actor_grad_norm"] for row in steps]
    record.check("every step had a gradient", bool(norms) and min(norms) > 0.0, norms)
    later = rows[1:] or rows
    for phase in PHASES:
        found = [row[f"timing/{phase}"] for row in later if f"timing/{phase}" in row]
        if found:
            record.figure(f"seconds_{phase}", round(statistics.median(found), 2))
    memory = {key for row in rows for key in row if key.startswith("memory/")}
    for key in sorted(memory):
        record.figure(key, max(row[key] for row in rows if key in row))
    environment = run_dir / "environment.json"
    if environment.is_file():
        record.figure("engine", json.loads(environment.read_text()).get("engine"))
    recipe = run_dir / "config.yaml"
    planned = plan_of(load_config(recipe)) if recipe.is_file() else None
    if planned is not None:
        plan = planned.as_json()
        time = plan["time"] or {}
        record.figure(
            "predicted",
            {key: plan.get(key) for key in PREDICTED}
            | {key: time.get(key) for key in ("seconds", "parts")},
        )


def unchanged_tensors(before: Path, after: Path) -> tuple[list[str], int]:
    """(names of the tensors that are the same or gone, how many there were) of two models."""
    found = dict(_tensors(after))
    same, total = [], 0
    for name, old in _tensors(before):
        total += 1
        # In the trained model's type: a start in float32 would differ from it by rounding alone.
        if name not in found or torch.equal(old.to(found[name].dtype), found[name]):
            same.append(name)
    return same, total


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def trained_model(run_dir: Path) -> Path:
    """The folder that the run wrote at its end."""
    return final_checkpoint(run_dir)


def environment(job: Job) -> None:
    """For this process and what it starts."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ["SG_PLATFORM"] = "cuda" if job.on_cuda else "cpu"
