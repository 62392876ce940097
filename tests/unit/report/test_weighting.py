"""Weights of tokens follow from the run's own config; where they cannot, nothing is invented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sg_rlhf.report.runs import read_run
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.weights.describe import RecipeLoss
from sg_rlhf.weights.token_gradients import gradient_reasons
from tests.unit.report.synthetic import write_run


def rule_of(tmp_path: Path, *overrides: str, recipe: str = "grpo_sg_tiny_cpu.yaml") -> RecipeLoss:
    run = read_run(write_run(tmp_path / "run", overrides=overrides, recipe=recipe))
    rule = weighting_of(run).rule
    assert rule is not None
    return rule


def test_published_constants_zero_likely_tokens_of_positive_advantage(tmp_path: Path) -> None:
    published = rule_of(tmp_path, "sg.weighting.upper=1.4")
    probs = [0.05, 0.2, 0.22, 0.99]
    log_probs = [math.log(p) for p in probs]
    weights = published.weights(log_probs)
    assert weights == pytest.approx([1.0, 1.2164, 1.2576, 1.4], abs=1e-3)
    # p = 0.2112 is where w = 1.24 = 1 + eps_high (docs/method.md).
    assert gradient_reasons(published, log_probs, 0.7) == "00dd"
    assert gradient_reasons(published, log_probs, -0.7) == "0000"
    assert gradient_reasons(published, log_probs, 0.0) == "aaaa"
    (dead,) = published.dead_zones()
    assert dead.positive and dead.zone is not None
    assert dead.zone[0] == pytest.approx(0.2112, abs=1e-4)


def test_small_weights_zero_unlikely_tokens_of_negative_advantage(tmp_path: Path) -> None:
    wide = rule_of(tmp_path, "sg.weighting.lower=0.5", "sg.weighting.upper=1.5")
    assert gradient_reasons(wide, [math.log(p) for p in (0.05, 0.08)], -1.0) == "d0"


def test_weights_above_the_dual_clip_are_zeroed_too(tmp_path: Path) -> None:
    steep = rule_of(
        tmp_path,
        "sg.weighting.alpha=8",
        "sg.weighting.mu=0.5",
        "sg.weighting.upper=4",
        "actor.dual_clip=3",
        "sg.weighting.lower=1",
    )
    assert gradient_reasons(steep, [math.log(p) for p in (0.1, 0.9)], -1.0) == "0u"


def test_a_weight_of_zero_leaves_no_gradient_outside_the_clip_either(tmp_path: Path) -> None:
    outside = rule_of(
        tmp_path, "sg.weighting.mu=0.9", "sg.weighting.lower=0", "sg.weighting.placement=outside"
    )
    log_probs = [math.log(0.1), math.log(0.9)]
    assert outside.weights(log_probs)[0] == 0
    assert gradient_reasons(outside, log_probs, 1.0) == "w0"


def test_outside_the_clip_nothing_is_zeroed(tmp_path: Path) -> None:
    outside = rule_of(tmp_path, "sg.weighting.upper=1.4", "sg.weighting.placement=outside")
    assert gradient_reasons(outside, [0.0, -1.0], 1.0) == "00"


def test_the_ratio_of_the_update_is_clipped(tmp_path: Path) -> None:
    """Eq. 13 with w = 1 and the recipe's range: 0.8 to 1.24."""
    plain = rule_of(tmp_path, recipe="grpo_tiny_cpu.yaml")
    assert (plain.eps_low, plain.eps_high) == (0.2, 0.24)
    before = [math.log(0.2)] * 3
    after = [math.log(p) for p in (0.2, 0.26, 0.15)]
    assert gradient_reasons(plain, before, 1.0, after) == "0c0"
    assert gradient_reasons(plain, before, -1.0, after) == "00c"


def test_what_the_correction_drops_is_told_apart(tmp_path: Path) -> None:
    icepop = rule_of(tmp_path, "sg.correction=icepop")
    ours, engines = [math.log(0.1)] * 3, [math.log(p) for p in (0.1, 0.01, 0.9)]
    assert gradient_reasons(icepop, ours, 1.0, engine_log_probs=engines) == "0rr"
    assert gradient_reasons(icepop, ours, 1.0) == "000"
    tis = rule_of(tmp_path, "sg.correction=tis")  # it limits, and drops nothing
    assert gradient_reasons(tis, ours, 1.0, engine_log_probs=engines) == "000"


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_loss_of_upstream_has_weight_one(tmp_path: Path, loss: str) -> None:
    stock = rule_of(tmp_path, f"actor.policy_loss_type={loss}", recipe="grpo_tiny_cpu.yaml")
    assert stock.weights([0.0, -3.0]) == [1.0, 1.0]
    assert gradient_reasons(stock, [0.0, -3.0], 1.0) == "00"
    # Of a response, not of a token, is the ratio of gspo.
    moved = gradient_reasons(stock, [-1.0], 1.0, [-0.1])
    assert moved == ("c" if loss == "ppo" else "0")
    assert stock.describe().startswith(f"policy loss {loss}: no token weights, w = 1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sg.weighting.normalize=batch_mean",), "normalize=batch_mean"),
        (("sg.weighting.type=random",), "no function of p alone: random"),
    ],
)
def test_what_does_not_follow_from_p_is_not_computed(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    unknown = weighting_of(read_run(write_run(tmp_path / "run", overrides=overrides)))
    assert unknown.rule is None and unknown.label.startswith("n/a") and words in unknown.label


def test_without_a_config_it_says_so(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "config.yaml").unlink()
    assert weighting_of(read_run(run_dir)).label == "not known: no usable config.yaml"
