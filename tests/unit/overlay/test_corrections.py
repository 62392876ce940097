"""The named corrections with every weighting: each token's gradient times its factor, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss

from sg_rlhf.algo.policy_loss import policy_loss_terms
from sg_rlhf.algo.weightings import WEIGHTINGS
from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.correction import CORRECTIONS
from sg_rlhf.overlay.losses import PolicyLossWithStatistics
from tests.unit.algo.batches import random_batch
from tests.unit.algo.test_algorithms import context_of
from tests.unit.overlay.test_losses import arguments


def factor(name: str, ratio: float) -> float:
    if name == "tis":
        return min(ratio, 2.0)
    kept = ratio <= 2.0 if name == "mis" else 0.5 <= ratio <= 5.0
    return ratio if kept else 0.0


def loss_and_gradient(
    flags: dict[str, Any], weighting: str, batch: Any, engine: torch.Tensor
) -> tuple[PolicyLossWithStatistics, tuple[Any, ...], torch.Tensor]:
    given = {key.rpartition(".")[2]: value for key, value in flags.items()}
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="grpo_sg", **given)
    loss = PolicyLossWithStatistics(upstream, arguments(weighting={"type": weighting}))
    loss.context = dataclasses.replace(context_of(batch), engine_log_probs=engine)
    log_probs = batch.log_probs.detach().clone().requires_grad_()
    found = loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask, engine)
    found[0].backward()
    assert log_probs.grad is not None
    return loss, found, log_probs.grad


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_a_correction_scales_each_tokens_gradient(name: str, weighting: str) -> None:
    batch = random_batch(5, rows=12, tokens=16)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    engine = batch.old_log_probs.detach() + noise.to(batch.old_log_probs.dtype)
    plain, (value, *_), gradient = loss_and_gradient({}, weighting, batch, engine)
    loss, found, corrected = loss_and_gradient(CORRECTIONS[name], weighting, batch, engine)
    ratio = (batch.old_log_probs - engine).exp()
    by_hand = torch.tensor(
        [[factor(name, r) for r in row] for row in ratio.tolist()], dtype=torch.float64
    )
    expected = torch.where(batch.mask, gradient * by_hand.to(gradient.dtype), 0.0)
    assert torch.allclose(corrected, expected, rtol=1e-6, atol=1e-9)
    terms = policy_loss_terms(
        *batch.tensors, loss.weighting, 0.2, 0.24,
        token_coef_BT=by_hand, context=loss.context,
    )  # fmt: skip
    assert float(found[0].detach()) == pytest.approx(terms.loss.item(), rel=1e-9)
    low, high = CORRECTIONS[name]["algo.advantage.is_correction_threshold"]
    outside = ((ratio < low) | (ratio > high))[batch.mask]
    assert 0 < float(found[4]) == pytest.approx(outside.double().mean().item())
    assert found[0].item() != value.item()
    # What the row says of the mismatch does not depend on the correction.
    rows = [one.take_statistics().metrics() for one in (plain, loss)]
    keys = [key for key in rows[0] if "mismatch" in key]
    assert {key: rows[0][key] for key in keys} == {key: rows[1][key] for key in keys}
    assert rows[0]["n_mismatch_tokens"] == int(batch.mask.sum())
    assert 0.0 < rows[0]["mismatch_ess"] < 1.0
    assert rows[0]["mismatch_max"] == pytest.approx(noise[batch.mask].abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("weighting", ["grpo_sg", "uniform"])
def test_what_the_mismatch_does_to_the_weight_is_within_its_slope(weighting: str) -> None:
    batch = random_batch(6, rows=12, tokens=16)
    engine = batch.old_log_probs.detach() + 0.05
    loss, _, _ = loss_and_gradient({}, weighting, batch, engine)
    metrics = loss.take_statistics().metrics()
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
        assert "--algo.advantage.is_correction_level" in config.to_argv()
    assert load_config(None).value("algo.advantage.is_correction_level") == "off"
    key = "algo.advantage.is_correction_mode"
    with pytest.raises(ConfigError, match=f"{key}=mask: sg.correction=tis stands for clip"):
        load_config(None, ["sg.correction=tis", f"{key}=mask"])
    with pytest.raises(ConfigError, match="sg.correction"):
        load_config(None, ["sg.correction=tiss"])
