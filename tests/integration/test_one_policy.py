"""Temperature, top-p, entropy and 16-bit numbers describe one policy in engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import Data, run_ranks, train

pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_engine_and_trainer_mean_the_same_by_every_setting(tmp_path: Path) -> None:
    run_ranks("one_policy.py", 1, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["top_p"] for row in found} == {1.0, 0.8, 0.5}
    for row in found:
        assert row["tokens"] > 40
        # Float32's rounding of logits, which the temperature divides.
        rounding = 1e-5 / min(row["temperature"], 1.0)
        assert row["truncated"] < rounding, row
        if row["top_p"] == 1:
            assert row["log_prob"] < rounding and row["entropy"] < rounding, row
        else:
            # Why a run with top-p is refused: the engine's policy is a part of the trainer's.
            assert row["log_prob"] > 0.01 and row["entropy"] > 0.01, row


def test_fp16_at_both_ends(tmp_path: Path, data: Data) -> None:
    run_dir = tmp_path / "fp16"
    done = train(run_dir, data, "ds.param_dtype=fp16", "data.max_samples=8", "eval.steps=-1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert len(rows) == 2
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    assert steps and all(step["actor_grad_norm"] > 0 for step in steps)
    # An engine in bf16 would be 40 times as far from the trainer.
    assert all(0 < row["sg/mismatch_kl_k3"] < 5e-6 for row in rows)
