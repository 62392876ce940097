"""One small data set and one run, interrupted and resumed, shared by the tests that read them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest

from sg_rlhf.overlay.fork_server.client import ForkServer
from sg_rlhf.run_dir import jsonl_log

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"

#: Small enough for two cores, large enough for two optimizer steps of two micro-batches each.
SMALL = [
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.micro_batch_size=8",
    "rollout.max_new_tokens=56",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "data.max_samples=8",
    "ckpt.save_steps=1",
    "eval.steps=2",
    "sg.wandb=disabled",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the pages of a file."""
    from tests.integration import browser  # most tests need none

    with browser.started() as found:
        yield found


@dataclass(frozen=True)
class Data:
    """Folders of a small generated data set."""

    folder: Path

    def overrides(self) -> list[str]:
        return [
            f"data.prompt_dataset={self.folder / 'train.jsonl'}",
            f"eval.dataset={self.folder / 'test.jsonl'}",
        ]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "WANDB_", "PYTEST"))}
    return {**kept, "SG_PLATFORM": "cpu", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}


def command(run_dir: Path, data: Data, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE), "--run-dir", str(run_dir),
        *data.overrides(), *SMALL, *overrides,
    ]  # fmt: skip


@functools.cache
def forked_python() -> str:
    """An interpreter that starts with torch and DeepSpeed imported, which takes 15 seconds else."""
    with mock.patch.dict(os.environ, environment(), clear=True):
        server = ForkServer()
    atexit.register(server.close)
    return str(server.python)


def run_ranks(script: str, ranks: int, *arguments: str) -> list[str]:
    """Run a file of this folder as gloo ranks of one job; their standard outputs.

    The ranks' process group is ended for them (`one_rank.py`).
    """
    folder = Path(__file__).parent
    # Below those that the system gives to whoever connects: one of these may be taken until it is
    # listened at.
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            break
    processes = [
        subprocess.Popen(
            [forked_python(), str(folder / "one_rank.py"), str(folder / script), *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **environment(), "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": str(rank),
                "LOCAL_RANK": "0",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


def train(run_dir: Path, data: Data, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run_dir, data, *overrides),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("kk") / "data"
    subprocess.run(
        [
            sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(folder),
            "--generate", "people=2-3", "per_size=16", "test_per_size=4", "seed=0",
        ],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return Data(folder)


@dataclass(frozen=True)
class Pipeline:
    """A run of four rollouts that was interrupted after the second and started again.

    Its processes before the interruption, those of them alive after it, and what it had written.
    """

    run_dir: Path
    status: int
    output: str
    children: set[int]
    survivors: list[int]
    checkpoint: str
    metrics: list[dict[str, Any]]
    resumed: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Pipeline:
    """Everything at once: engine, reward, reference, ZeRO-3, weight sync, Ctrl-C, resuming."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    # 18 prompts: two too many for 4 rollouts of 4, and too few for 5.
    more = ["data.max_samples=18", "ckpt.save_hf=true", "ckpt.max_num=2"]
    # As a user hides the GPUs of a machine.
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command(run_dir, data, *more), cwd=ROOT, env=hidden, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    latest = run_dir / "checkpoints" / "deepspeed" / "_actor" / "latest"
    children: set[int] = set()
    deadline = time.time() + 1800
    while process.poll() is None and time.time() < deadline:
        children |= {c.pid for c in psutil.Process(process.pid).children(recursive=True)}
        if latest.exists() and latest.read_text().strip() not in ("", "global_step1"):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=1800)[0]
    assert latest.exists(), f"status {process.returncode}, no checkpoint:\n{output}"
    time.sleep(1)
    checkpoint = latest.read_text().strip()
    metrics = jsonl_log.read(run_dir / jsonl_log.METRICS)
    # As if killed after the checkpoint, while it evaluated.
    evaluations = run_dir / jsonl_log.EVALUATIONS
    done = int(checkpoint.removeprefix("global_step"))
    kept = [row for row in jsonl_log.read(evaluations) if row["global_step"] != done]
    evaluations.write_text("".join(json.dumps(row) + "\n" for row in kept))
    survivors = [pid for pid in children if is_alive(pid)]
    resumed = train(run_dir, data, *more)
    return Pipeline(
        run_dir, process.returncode, output, children, survivors, checkpoint, metrics, resumed
    )


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def trained(pipeline: Pipeline) -> Path:
    """The run's directory when it was through."""
    assert pipeline.resumed.returncode == 0, pipeline.resumed.stdout + pipeline.resumed.stderr
    return pipeline.run_dir
