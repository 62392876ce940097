"""Every correction with every weighting: each token's gradient times its factor, by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss

from sg_rlhf.algo.policy_loss import policy_loss_terms
from sg_rlhf.algo.weightings import WEIGHTINGS
from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.correction_presets import CORRECTIONS
from sg_rlhf.overlay.learner.policy_loss import PolicyLossWithStatistics
from tests.unit.algo.batches import random_batch
from tests.unit.algo.test_algorithms import context_of
from tests.unit.overlay.learner.test_policy_loss import arguments

#: Every correction of upstream's: the named ones, and those that its flags alone make.
CASES = {
    **{
        name: {key.rpartition("is_correction_")[2]: value for key, value in flags.items()}
        for name, flags in CORRECTIONS.items()
    },
    "seq": {"level": "seq", "mode": "mask", "gating": "ratio", "threshold": [0.8, 1.25]},
    **{
        f"{level} {gating}": {
            "level": level, "mode": "mask", "gating": gating, "threshold": [0.0, high],
        }
        for level in ("token", "seq") for gating, high in (("binary_kl", 0.05), ("tv", 0.1))
    },
}  # fmt: skip


def statistic(gating: str, trainer: float, engine: float) -> float:
    """Of one token, from its two log-probs; the log of the ratio, or a divergence."""
    if gating == "ratio":
        return trainer - engine
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (engine, trainer))
    if gating == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def factors(
    case: dict[str, Any], trainer: list[float], engine: list[float], mask: list[bool]
) -> tuple[list[float], list[bool]]:
    """(each token's factor, whether it is outside the limits) of one response, by hand."""
    low, high = case["threshold"]
    found = [statistic(case["gating"], t, e) for t, e in zip(trainer, engine, strict=True)]
    if case["level"] == "seq":
        kept = [value for value, inside in zip(found, mask, strict=True) if inside]
        # A response without tokens has no mean, and counts as outside.
        found = [sum(kept) / len(kept) if kept else math.nan] * len(found)
    if case["gating"] == "ratio":
        found = [math.exp(value) for value in found]
    if case["mode"] == "clip":
        given = [min(max(value, low), high) for value in found]
    else:
        ratios = [math.exp(t - e) for t, e in zip(trainer, engine, strict=True)]
        given = [
            ratio if low <= value <= high else 0.0
            for value, ratio in zip(found, ratios, strict=True)
        ]
    return given, [not low <= value <= high for value in found]


def loss_and_gradient(
    case: dict[str, Any], weighting: str, batch: Any, engine: torch.Tensor
) -> tuple[PolicyLossWithStatistics, tuple[Any, ...], torch.Tensor]:
    given = {f"is_correction_{key}": value for key, value in case.items()}
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo", **given)
    loss = PolicyLossWithStatistics(upstream, arguments(weighting={"type": weighting}))
    loss.context = dataclasses.replace(context_of(batch), engine_log_probs=engine)
    log_probs = batch.log_probs.detach().clone().requires_grad_()
    found = loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask, engine)
    found[0].backward()
    assert log_probs.grad is not None
    return loss, found, log_probs.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_a_correction_scales_each_tokens_gradient(name: str, weighting: str) -> None:
    case = CASES[name]
    batch = random_batch(5, rows=12, tokens=16)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    engine = batch.old_log_probs.detach() + noise.to(batch.old_log_probs.dtype)
    plain, (value, *_), gradient = loss_and_gradient({}, weighting, batch, engine)
    loss, found, corrected = loss_and_gradient(case, weighting, batch, engine)
    rows = [
        factors(case, *row)
        for row in zip(
            batch.old_log_probs.tolist(), engine.tolist(), batch.mask.tolist(), strict=True
        )
    ]
    by_hand = torch.tensor([given for given, _ in rows], dtype=torch.float64)
    expected = torch.where(batch.mask, gradient * by_hand.to(gradient.dtype), 0.0)
    assert torch.allclose(corrected, expected, rtol=1e-5, atol=1e-9)
    terms = policy_loss_terms(
        *batch.tensors, loss.weighting, 0.2, 0.24,
        token_coef_BT=by_hand, context=loss.context,
    )  # fmt: skip
    assert float(found[0].detach()) == pytest.approx(terms.loss.item(), rel=1e-6)
    outside = torch.tensor([out for _, out in rows])
    # Of the responses where they are what is kept or dropped, else of the tokens.
    counted = outside[:, 0] if case["level"] == "seq" else outside[batch.mask]
    share = counted.double().mean().item()
    assert 0 < share < 1 and float(found[4]) == pytest.approx(share)
    assert found[0].item() != value.item()
    # What the row says of the mismatch does not depend on the correction.
    without, with_it = (one.pop_statistics().metrics() for one in (plain, loss))
    keys = [key for key in without if "mismatch" in key]
    assert {key: without[key] for key in keys} == {key: with_it[key] for key in keys}
    assert without["n_mismatch_tokens"] == int(batch.mask.sum())
    assert 0.0 < without["mismatch_ess"] < 1.0
    assert without["mismatch_max"] == pytest.approx(noise[batch.mask].abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("weighting", ["grpo_sg", "uniform"])
def test_what_the_mismatch_does_to_the_weight_is_within_its_slope(weighting: str) -> None:
    batch = random_batch(6, rows=12, tokens=16)
    engine = batch.old_log_probs.detach() + 0.05
    loss, _, _ = loss_and_gradient({}, weighting, batch, engine)
    metrics = loss.pop_statistics().metrics()
    p = torch.linspace(0.0, 1.0, 100_001, dtype=torch.float64)
    w = loss.weighting.curve(p)
    slope = float((w[1:] - w[:-1]).abs().max() / (p[1] - p[0]))
    largest = float((engine.exp() - batch.old_log_probs.exp())[batch.mask].abs().max())
    assert metrics["mismatch_weight_max"] <= slope * largest * (1 + 1e-6)
    assert (metrics["mismatch_weight_max"] > 0.0) == (weighting == "grpo_sg")


def test_a_name_stands_for_upstreams_flags() -> None:
    for name, flags in CORRECTIONS.items():
        config = load_config(None, [f"sg.correction={name}"])
        assert {key: config.value(key) for key in flags} == flags
    assert load_config(None).value("algo.advantage.is_correction_level") == "off"
    key = "algo.advantage.is_correction_mode"
    with pytest.raises(ConfigError, match=f"{key}=mask: sg.correction=tis sets it to clip"):
        load_config(None, ["sg.correction=tis", f"{key}=mask"])
    with pytest.raises(ConfigError, match="sg.correction"):
        load_config(None, ["sg.correction=tiss"])
