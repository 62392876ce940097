"""A study of one small cell through the real pipeline: interrupted, resumed, measured again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import ROOT, SMALL, environment

pytestmark = [pytest.mark.integration, pytest.mark.full]

STUDY = {
    "about": "one algorithm, one rollout",
    "base": str(ROOT / "configs" / "kk" / "grpo_tiny_cpu.yaml"),
    "baseline": "grpo",
    "seeds": [0],
    "data": {"small": "people=2 per_size=8 test_per_size=4 seed=0"},
    "set": {
        "data.prompt_dataset": "{data}/small/train.jsonl",
        "eval.dataset": None,
        "sg.eval_sets": [
            {"name": "held_out", "dataset": "{data}/small/test.jsonl", "temperature": 0.7}
        ],
        **{key: yaml.safe_load(value) for key, value in (item.split("=") for item in SMALL)},
        "data.max_samples": 4,
    },
    "sharpness": {
        "data": "{data}/small/train.jsonl", "rho": [0.05],
        "arguments": "--prompts 2 --group 2 --threads 1",
    },
    "accuracy": {
        "sets": {"held_out": "{data}/small/test.jsonl"},
        "arguments": "--prompts 4 --samples 2 --threads 1",
    },
    "regimes": {"base": {}},
    "variants": {"grpo": {}},
    "plan": [{"regimes": ["base"], "variants": ["grpo"]}],
}  # fmt: skip


def write(path: Path, accuracy: str) -> None:
    section = {**STUDY["accuracy"], "arguments": accuracy}  # type: ignore[dict-item]
    path.write_text(yaml.safe_dump({**STUDY, "accuracy": section}))


def test_a_cell_is_resumed_and_measured_again_without_training(tmp_path: Path) -> None:
    path, out, runs = tmp_path / "one.yaml", tmp_path / "out", tmp_path / "runs"
    command = [
        sys.executable, "-m", "lab.study", "--study", str(path), "--out", str(out),
        "--runs", str(runs),
    ]  # fmt: skip
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "text": True}

    def study(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, timeout=1800, **options)

    write(path, "--prompts 4 --samples 2 --threads 1")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options
    )
    deadline = time.time() + 1800
    while not list(runs.glob("base/grpo/s0-*/terminal.log")) and time.time() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    time.sleep(3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=1800)[1]
    assert process.returncode == 130 and "the same command continues" in errors
    assert not psutil.wait_procs(children, timeout=1800)[1]

    done = study()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of 1 runs are complete; 1 to train\n")
    assert "base/grpo/s0: held_out " in done.stdout and str(out / "results.md") in done.stdout
    page = runs / "base" / "report.html"
    assert f"page of the runs: {page}\n" in done.stdout and "s0-" in page.read_text()
    file = out / "cells" / "base.grpo.s0.json"
    cell = json.loads(file.read_text())
    assert cell["figures"]["rollouts"] == 1 and cell["accuracy"]["samples"] == 2
    assert cell["figures"]["sharpness"] == cell["sharpness"]["results"][0]["sharpness"]
    assert study("--list").stdout.startswith("done           base/grpo/s0\n1 of 1 done")

    # A measurement that fails leaves what was there.
    write(path, "--prompts 0 --samples 2")
    before = file.read_bytes()
    failed = study()
    assert failed.returncode == 1 and failed.stdout.startswith(
        "0 of 1 runs are complete; 1 to measure\n"
    )
    assert "failed: base/grpo/s0: lab.measure.accuracy ended with status 2; see " in failed.stderr
    assert file.read_bytes() == before

    # Other measurements of the same run: it is not trained again.
    (run_dir,) = runs.glob("base/grpo/s0-*")
    metrics = (run_dir / jsonl_log.METRICS).stat()
    write(path, "--prompts 4 --samples 3 --threads 1")
    assert study().returncode == 0
    assert (run_dir / jsonl_log.METRICS).stat() == metrics
    again = json.loads(file.read_text())
    assert again["accuracy"]["samples"] == 3 and again["sharpness"] == cell["sharpness"]
    assert again["fingerprint"] == cell["fingerprint"]

    # Without its checkpoint that would take the training again, and is said.
    shutil.rmtree(run_dir)
    write(path, "--prompts 4 --samples 2 --threads 1")
    assert study("--list").stdout.startswith("to train again base/grpo/s0\n")
