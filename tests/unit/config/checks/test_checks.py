"""All problems of a recipe are found at once, and every command that reads recipes shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, checks, load_config
from sg_rlhf.plan.command import main as plan
from sg_rlhf.train import main as train

TINY = Path(__file__).parents[4] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
WRONG = ["rollout.top_p=0.9", "vllm.sync_with_ray=true", "sg.update=lopti", "actor.entropy_coef=1"]


def test_a_shipped_recipe_has_no_problem() -> None:
    config = load_config(TINY)
    assert checks.problems(config) == []
    checks.check(config)


def test_a_problem_of_each_check_is_a_line() -> None:
    config = load_config(TINY, WRONG)
    first, second = checks.problems(config)
    assert first.startswith("vllm.sync_with_ray=true: not with sg.weight_sync=buckets")
    assert second.startswith("actor.entropy_coef=1.0: expected 0 with sg.update=lopti")
    with pytest.raises(ConfigError, match="^vllm.sync_with_ray=true"):
        checks.check(config)


def test_the_mean_over_prompts_needs_a_loss_of_ours() -> None:
    mean = "actor.loss_agg_mode=prompt-mean"
    assert checks.problems(load_config(TINY, [mean])) == []
    (line,) = checks.problems(
        load_config(TINY, [mean, "actor.policy_loss_type=ppo", "algo.kl.estimator=k3"])
    )
    assert line.startswith(f"{mean}: with actor.policy_loss_type=ppo expected token-mean or ")


def test_without_a_count_nothing_else_is_checked() -> None:
    config = load_config(TINY, [*WRONG, "vllm.num_engines=null"])
    assert checks.problems(config) == ["vllm.num_engines: not set: expected 1 or more"]


def test_plan_and_dry_run_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--config", str(TINY), "rollout.top_p=0.9"]) == 0
    assert "train refuses this recipe: rollout.top_p=0.9: " in capsys.readouterr().err
    assert train(["--config", str(TINY), "--dry-run", "rollout.top_p=0.9"]) == 2
    assert capsys.readouterr().err.startswith("error: rollout.top_p=0.9: ")
