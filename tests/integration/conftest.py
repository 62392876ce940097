"""One small data set and one trained run, shared by the tests that read them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"

#: Small enough for two cores, large enough for two optimizer steps of two micro-batches each.
SMALL = [
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.micro_batch_size=8",
    "rollout.max_new_tokens=48",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "data.max_samples=8",
    "ckpt.save_steps=1",
    "eval.steps=2",
    "sg.wandb=disabled",
]


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


def run_ranks(script: str, ranks: int, *arguments: str) -> list[str]:
    """Run a file of this folder as gloo ranks of one job; their standard outputs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
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
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


def train(run_dir: Path, data: Data, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run_dir, data, *overrides),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("kk") / "data"
    subprocess.run(
        [
            sys.executable, "-m", "sg_rlhf.data", "kk", "--out", str(folder),
            "--generate", "people=2-3", "per_size=16", "test_per_size=4", "seed=0",
        ],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return Data(folder)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Path:
    """Two rollouts through everything: engine, reward, reference, ZeRO-3, weight sync."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    result = train(run_dir, data)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir
