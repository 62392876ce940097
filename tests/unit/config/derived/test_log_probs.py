"""Which samples need a pass for their old log-probs: each exemption, and the plan's count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.config.derived.log_probs import OldLogProbRule, old_log_prob_rule
from sg_rlhf.machine.hardware import of_gpus
from sg_rlhf.plan.run_shape import run_shape
from sg_rlhf.plan.time import scoring

RECIPES = Path(__file__).parents[4] / "configs"
#: 16 prompts of 8 responses in optimizer steps of 64: two a rollout.
TINY = RECIPES / "kk" / "grpo_sg_tiny_cpu.yaml"


def rule(*overrides: str, algorithm: str | None = None) -> OldLogProbRule:
    files = [TINY, *([RECIPES / "algorithms" / f"{algorithm}.yaml"] if algorithm else [])]
    return old_log_prob_rule(load_config(files, list(overrides)).value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algo.kl.use_loss=false", "algo.kl.estimator=k3"], "algo.kl.use_loss=false"),
        (["sg.weighting.normalize=batch_mean"], "batch_mean"),
        (["algo.advantage.is_correction_level=token"], "is_correction_level=token"),
        (["algo.advantage.is_correction_level=seq"], "is_correction_level=seq"),
        (["ds.lora.rank=8", "ds.lora.dropout=0.1"], "ds.lora.dropout"),
    ],
)
def test_what_reads_them_before_the_update_has_a_pass_over_all(
    overrides: list[str], key: str
) -> None:
    for steps in (64, 128):
        found = rule(*overrides, f"train.batch_size={steps}")
        assert (found.of, found.share) == ("all", 1.0)
        assert key in found.why


def test_lopti_parts_tokens_by_them() -> None:
    assert rule(algorithm="lopti").of == "all"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algo.kl.init_coef=0", "algo.kl.use_loss=false"],  # no KL at all
        ["ds.lora.dropout=0.1"],  # without adapters nothing is dropped
        ["train.dynamic_batch_enable=true"],
        ["train.max_epochs=2"],
        ["actor.policy_loss_type=gspo", "algo.kl.estimator=k3"],
        ["sg.weighting.probability=engine"],  # of the engine, which returns them
    ],
)
def test_without_such_a_reader_later_optimizer_steps_alone_have_it(overrides: list[str]) -> None:
    assert rule(*overrides)[:2] == ("later", 0.5)
    assert rule(*overrides, "train.batch_size=32")[:2] == ("later", 0.75)
    found = rule(*overrides, "train.batch_size=128")
    assert found[:2] == ("none", 0.0) and "one optimizer step" in found.why


def test_of_the_shipped_algorithms_four_have_a_pass_over_all() -> None:
    """Lopti's, STARE's ranks, and weights that are divided by their mean over the rollout."""
    names = [path.stem for path in RECIPES.glob("algorithms/*.yaml")]
    over_all = {name for name in names if rule(algorithm=name).of == "all"}
    assert over_all == {"lopti", "ar_lopti", "grpo_sg_normalized", "stare"}


def test_the_plan_counts_the_pass_for_what_needs_it() -> None:
    run = run_shape(load_config(TINY, []))
    assert run is not None and run.old_share == 0.5
    machine = of_gpus("h100", nodes=1, gpus_per_node=1)
    seconds = {
        share: scoring(dataclasses.replace(run, old_share=share), machine)
        for share in (0.0, 0.5, 1.0)
    }
    # The reference's pass is there in any case.
    assert seconds[1.0] == pytest.approx(2 * seconds[0.0])
    assert seconds[0.5] == pytest.approx(1.5 * seconds[0.0])
