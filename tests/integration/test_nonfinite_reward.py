"""Real runs whose rewards have no signal: NaN, which is left out up to a bound, and equal ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import Data, train

pytestmark = [pytest.mark.integration, pytest.mark.full]

REWARD = """
from sg_rlhf.tasks.kk.domain import KK
from sg_rlhf.tasks.reward import reward_function

graded = reward_function(KK)
calls = []

def reward_func(queries, prompts, labels):
    calls.append(None)
    bad = {where}  # before grading: other threads call this meanwhile
    found = graded(queries, prompts, labels)
    if bad:
        found |= {{"rewards": float("nan"), "scores": float("nan")}}
    return found
"""
NO_EVALUATION = ["sg.eval_at_start=false", "eval.dataset=null"]


def reward(folder: Path, where: str) -> str:
    path = folder / "reward.py"
    path.write_text(REWARD.format(where=where))
    return f"reward.remote_url={path}"


def test_a_run_goes_on_without_them(data: Data, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = train(
        run_dir, data, "sg.on_nonfinite=skip", "algo.dynamic_filtering_enable=false",
        *NO_EVALUATION, reward(tmp_path, "len(calls) == 1"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = jsonl_log.read(run_dir / jsonl_log.NONFINITE)
    metrics = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert [row["nonfinite/skipped_steps"] for row in metrics] == [0.0, 0.0]
    of_engines = len(rows[0]["prompts"])  # each has called its own function once
    assert 1 <= of_engines <= 2 and len(rows) == 1
    assert (rows[0]["global_step"], rows[0]["cause"]) == (1, "reward")
    assert [row["nonfinite/samples"] for row in metrics] == [rows[0]["left_out"], 0.0]
    assert all(row["rollout/reward_mean"] is not None for row in metrics)
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    assert [row["optimizer_step"] for row in steps] == [1, 2, 3, 4]
    assert all(
        row["policy_loss"] is not None and row["actor_grad_norm"] is not None for row in steps
    )
    where = f"prompt {rows[0]['prompts'][0]}"
    said = result.stdout + result.stderr
    assert f"rollout 1: {rows[0]['left_out']} responses dropped from the update: reward" in said
    assert where in said


def test_a_run_without_any_finite_reward_stops(data: Data, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = train(
        run_dir, data, "sg.on_nonfinite=skip", *NO_EVALUATION,
        "algo.dynamic_filtering_enable=false", reward(tmp_path, "True"),
    )  # fmt: skip
    assert result.returncode == 1
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("stopped: ")]
    assert "3 optimizer steps in a row were skipped before it (their prompts: " in line
    rows = jsonl_log.read(run_dir / jsonl_log.NONFINITE)
    assert [row["optimizer_step"] for row in rows] == [None, 1, 2, None, 3, 4]
    assert rows[0]["left_out"] == 16


def test_a_run_with_equal_rewards_trains_nothing_and_says_so(data: Data, tmp_path: Path) -> None:
    """Rewards of 0.9, whose mean over eight responses is not 0.9 in float32."""
    run_dir, path = tmp_path / "run", tmp_path / "reward.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': 0.9, 'scores': 0.9, 'extra_logs': {'correct': 0.0}}\n"
    )
    result = train(
        run_dir, data, f"reward.remote_url={path}", "algo.dynamic_filtering_enable=false",
        "rollout.n_samples_per_prompt=8", "rollout.max_new_tokens=2", "algo.kl.init_coef=0",
        *NO_EVALUATION,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    message = (
        "nothing was learned: no group had different rewards; 100 % of the responses reached the "
        "token limit"
    )
    assert result.stderr.splitlines()[-1] == f"warning: {message}"
    assert result.stdout.count(f"alert: {message}") == 1
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert {row["rollout/frac_reward_zero_std"] for row in rows} == {1.0}
    steps = jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS)
    assert len(steps) > 1 and {row["actor_grad_norm"] for row in steps} == {0.0}
