"""sg_rlhf/integrations in other trainers: the same loss and gradient; TRL trains with it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "integrations"
HERE = "tests/integration"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (FOLDER / "made").exists(),
        reason="needs TRL, verl and Molt: `make .cache/integrations/made`",
    ),
]


def run(*arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a script of this folder prints in the trainers' environment."""
    done = subprocess.run(
        [str(FOLDER / "bin" / "python"), *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.mark.parametrize(
    ("trainer", "cases", "loss", "gradient"),
    [
        ("verl", 12, 0.0, 0.0),
        ("molt", 16, 1e-6, 1e-6),
        ("trl", 21, 1e-6, 2e-5),
        ("tinker", 4, 1e-6, 1e-6),
        ("prime_rl", 4, 1e-6, 1e-6),
        ("torchtitan", 4, 1e-6, 1e-5),
    ],
)
def test_loss_and_gradient_are_ours(trainer: str, cases: int, loss: float, gradient: float) -> None:
    rows = run(f"{HERE}/other_trainers.py", trainer)
    assert len(rows) == cases
    wrong = [row for row in rows if not (row["loss"] <= loss and row["gradient"] <= gradient)]
    assert not wrong


def test_trl_trains_the_tiny_model() -> None:
    lines = run(f"{HERE}/train_with_trl.py")
    rewards = [line["reward"] for line in lines]
    assert len(rewards) == 5
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.2
    for line in lines:
        assert 1.0 <= line["sg/weight_mean"] <= 1.2
        assert 0 < line["grad_norm"] < 10
    assert lines[0]["kl"] == 0 and lines[-1]["kl"] > 0


def test_equal_rewards_train_nothing_in_trl() -> None:
    """The mean of eight rewards of 0.9 is not 0.9 in float32."""
    lines = run(f"{HERE}/train_with_trl.py", "2", "0.9")
    assert [line["grad_norm"] for line in lines] == [0.0]
