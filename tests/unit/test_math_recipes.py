"""The mathematics recipes have every value of Table 6 and those that the table leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.algo.weightings import GrpoSG
from sg_rlhf.config import SGSettings, load_config

CONFIGS = Path(__file__).parents[2] / "configs" / "math"

# Table 6's first column, then what the table leaves out (docs/method.md).
EXPECTED = {
    "rollout.n_samples_per_prompt": 8,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.max_new_tokens": 4096,
    "actor.optim": "adam",
    "actor.adam.lr": 1e-6,
    "algo.kl.init_coef": 0.001,
    "algo.kl.use_loss": True,
    "actor.eps_clip_low_high": [0.20, 0.24],
    "rollout.batch_size": 128,
    "train.batch_size": 512,
    "actor.adam.betas": [0.9, 0.999],
    "actor.adam.weight_decay": 0.01,
    "actor.lr_scheduler": "constant",
    "actor.lr_warmup_ratio": 0.0,
    "actor.max_norm": 1.0,
    "actor.dual_clip": 10.0,
    "actor.loss_agg_mode": "token-mean",
    "ckpt.save_steps": 20,
    "ckpt.max_num": 3,
    "actor.model_name_or_path": "Qwen/Qwen2.5-7B",
    "data.apply_chat_template": False,
}


@pytest.mark.parametrize("data", ["dsr", "orz"])
def test_every_value_of_table_6(data: str) -> None:
    grpo = load_config(CONFIGS / f"grpo_{data}_qwen2.5-7b.yaml")
    sg = load_config(CONFIGS / f"grpo_sg_{data}_qwen2.5-7b.yaml")
    for config in (grpo, sg):
        assert {key: config.values.get(key) for key in EXPECTED} == EXPECTED
        assert config.value("data.prompt_dataset") == f"data/math_{data}/train.jsonl"
    # The two runs that the paper compares differ in the weights alone.
    differing = {key for key in sg.values if sg.value(key) != grpo.value(key)}
    assert differing == {"actor.policy_loss_type", "algo.kl.estimator"}
    assert sg.values["actor.policy_loss_type"] == "weighted_ppo"
    assert sg.values["algo.kl.estimator"] == "wk3"
    published = GrpoSG(
        alpha=2.0, mu=0.25, tau=9.0, lower=1.0, upper=1.4, form="product", placement="inside"
    )
    assert sg.sg == SGSettings(
        weighting={"type": "grpo_sg", **published.parameters()},
        eval_sets=grpo.sg.eval_sets,
    )
    settings = {s.name: (s.temperature, s.n_samples_per_prompt) for s in grpo.sg.eval_sets}
    assert settings == {"math500": (0.0, 1), "amc": (1.0, 16), "aime": (1.0, 16)}
