"""The policy loss of the trainer, and the corrections of its old log-probs."""

from __future__ import annotations

import dataclasses
import math
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.models.utils import compute_approx_kl

from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import WEIGHTINGS, GrpoSG
from sg_rlhf.config import ConfigError, SGSettings, load_config
from sg_rlhf.config.checks.losses import check_weighting
from sg_rlhf.config.correction_presets import CORRECTIONS
from sg_rlhf.overlay.learner.policy_loss import PolicyLossWithStatistics, kl_dispatcher
from sg_rlhf.overlay.learner.replay_buffer import Denominators
from sg_rlhf.overlay.reporting.errors import NonFiniteError
from tests.unit.algo.batches import random_batch
from tests.unit.algo.test_algorithms import context_of

# -- Losses in upstream's trainer: stock ones pass bit for bit, ours share their weights ---------


def arguments(loss: str = "weighted_ppo", estimator: str = "wk3", **sg: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sg=SimpleNamespace(**SGSettings(**sg).model_dump()),
        actor=SimpleNamespace(policy_loss_type=loss, loss_agg_mode="token-mean"),
        algo=SimpleNamespace(kl=SimpleNamespace(estimator=estimator)),
    )


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 13)
    old = -torch.rand(shape, generator=generator) * 4
    mask = (torch.rand(shape, generator=generator) > 0.2).long()
    return {
        "log_probs": (old + torch.randn(shape, generator=generator) * 0.3).to(dtype),
        "old_log_probs": old.to(dtype),
        "advantages": torch.randn((4, 1), generator=generator).expand(shape).clone(),
        "action_mask": mask,
        "rollout_log_probs": (old + torch.randn(shape, generator=generator) * 0.1).to(dtype),
    }


def run(loss: Any, data: dict[str, torch.Tensor], **info: Any) -> tuple[Any, torch.Tensor]:
    log_probs = data["log_probs"].clone().requires_grad_()
    result = loss(**{**data, "log_probs": log_probs}, **info)
    result[0].backward()
    assert log_probs.grad is not None
    return result, log_probs.grad


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("level", ["off", "token", "seq"])
@pytest.mark.parametrize("denominators", [Denominators(), Denominators(2, 77.0, 9.0)])
def test_stock_losses_are_upstreams_own_bit_for_bit(
    loss_type: str, dual_clip: float | None, level: str, denominators: Denominators
) -> None:
    def build() -> PolicyLoss:
        return PolicyLoss(
            0.2, 0.24, dual_clip=dual_clip, policy_loss_type=loss_type, is_correction_level=level
        )

    data = batch()
    info = {
        "dp_size": denominators.ranks,
        "batch_num_tokens": denominators.tokens,
        "global_batch_size": denominators.responses,
    }
    expected, expected_grad = run(build(), data, **info)
    loss = PolicyLossWithStatistics(build(), arguments(loss_type, "k3"))
    found, found_grad = run(loss, data, denominators=denominators)
    assert torch.equal(expected_grad, found_grad)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("level", ["off", "token"])
def test_ours_is_the_pure_loss_with_upstreams_settings(level: str) -> None:
    data = batch(1)
    upstream = PolicyLoss(
        0.2, 0.24, dual_clip=10.0, policy_loss_type="weighted_ppo", is_correction_level=level
    )
    loss = PolicyLossWithStatistics(
        upstream, arguments(weighting={"type": "grpo_sg", "upper": 1.2})
    )
    found, grad = run(loss, data, denominators=Denominators(tokens=40.0))
    log_probs = data["log_probs"].clone().requires_grad_()
    coefficient = None
    if level == "token":
        log_is = data["old_log_probs"] - data["rollout_log_probs"]
        keep = (log_is.exp() >= 0.5) & (log_is.exp() <= 5.0)
        coefficient = torch.where(keep, log_is.exp(), 0.0)
    expected = policy_loss(
        log_probs,
        data["old_log_probs"],
        data["advantages"],
        data["action_mask"],
        LossSettings(GrpoSG(upper=1.2), 0.2, 0.24, 10.0),
        total=40.0,
        coefficient=coefficient,
    ).loss
    expected.backward()
    assert torch.equal(found[0], expected)
    assert log_probs.grad is not None and torch.allclose(grad, log_probs.grad)
    assert (found[3] is None) == (level == "off")


def test_statistics_add_up_over_micro_batches() -> None:
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo")
    whole, parts = (PolicyLossWithStatistics(upstream, arguments()) for _ in range(2))
    data = batch(2)
    run(whole, data)
    for i in range(4):
        run(parts, {k: v[i : i + 1] for k, v in data.items()})
    expected, found = whole.pop_statistics().metrics(), parts.pop_statistics().metrics()
    assert found.keys() == expected.keys() and expected["n_tokens"] == float(
        data["action_mask"].sum()
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_weighted_kl_shares_the_losss_weights_and_stock_kl_is_upstreams() -> None:
    data, base = batch(3), batch(4)["old_log_probs"]
    args = arguments(weighting={"type": "grpo_sg", "upper": 1.2})
    loss = PolicyLossWithStatistics(PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo"), args)
    run(loss, data)
    kl = kl_dispatcher(args, loss)
    weights = token_weights(data["log_probs"], GrpoSG(upper=1.2), data["action_mask"])
    mask = data["action_mask"].bool()
    found = kl(data["log_probs"], base, kl_estimator="wk3")
    assert torch.equal(found[mask], kl_estimate(data["log_probs"], base, weights, "wk3")[mask])
    for name in ("k1", "k2", "k3"):
        for unbiased in (False, True):
            ours = kl(data["log_probs"], base, data["old_log_probs"], name, unbiased)
            theirs = compute_approx_kl(
                data["log_probs"], base, data["old_log_probs"], name, unbiased
            )
            assert torch.equal(ours, theirs)


def test_without_a_loss_the_kl_takes_its_weights_from_the_log_probs() -> None:
    data, base = batch(5), batch(6)["old_log_probs"]
    found = kl_dispatcher(arguments("ppo", "wk3"), None)(
        data["log_probs"], base, kl_estimator="wk3"
    )
    weights = token_weights(data["log_probs"], GrpoSG())
    assert torch.equal(found, kl_estimate(data["log_probs"], base, weights, "wk3"))


@pytest.mark.parametrize("loss_type", ["ppo", "weighted_ppo"])
def test_a_nan_stops_before_backward_and_says_where(loss_type: str) -> None:
    data = batch(7)
    position = tuple(data["action_mask"].nonzero()[0])
    data["log_probs"][position] = float("nan")
    loss = PolicyLossWithStatistics(
        PolicyLoss(0.2, 0.24, policy_loss_type=loss_type), arguments(loss_type, "k3")
    )
    with pytest.raises(NonFiniteError, match="1 log_probs; nothing was trained"):
        run(loss, data)


def test_a_pass_of_lopti_leaves_the_other_tokens_out_of_loss_kl_and_statistics() -> None:
    data, base = batch(8), batch(9)["old_log_probs"]
    args = arguments(weighting={"type": "uniform"}, update="lopti", lopti_threshold=0.3)
    loss = PolicyLossWithStatistics(PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo"), args)
    low = data["old_log_probs"].exp() < 0.3
    mask = data["action_mask"].bool()
    for name, active in (("low", low), ("rest", ~low)):
        loss.lopti_pass = name
        _, grad = run(loss, data, denominators=Denominators(tokens=40.0))
        kl = kl_dispatcher(args, loss)(data["log_probs"], base, kl_estimator="k3")
        statistics = loss.pop_statistics()
        assert torch.equal(grad != 0, active & mask & (grad != 0)) and bool((grad != 0).any())
        assert torch.equal(kl[~active], torch.zeros_like(kl[~active]))
        assert statistics["tokens"] == statistics["kl_tokens"] == (active & mask).sum() > 0
        plain = compute_approx_kl(data["log_probs"], base, None, "k3")[active & mask]
        assert statistics.metrics()["kl_mean"] == pytest.approx(float(plain.mean()))
    loss.lopti_pass = None
    run(loss, data)
    assert loss.active_BT is None


@pytest.mark.parametrize(
    ("loss", "use_loss", "refused"),
    [
        ("ppo", True, True),
        ("ppo", False, True),
        ("weighted_ppo", False, True),
        ("weighted_ppo", True, False),
    ],
)
@pytest.mark.parametrize("estimator", ["wk3", "wk3_eq11"])
def test_a_normalized_weighted_kl_needs_the_losss_weights(
    loss: str, use_loss: bool, refused: bool, estimator: str
) -> None:
    """Elsewhere nothing knows the rollout's mean, or which positions are a response's."""
    args = arguments(loss, estimator, weighting={"type": "grpo_sg", "normalize": "batch_mean"})
    args.algo.kl.use_loss = use_loss
    args.actor.entropy_coef = 0.0
    value = lambda key: operator.attrgetter(key)(args)  # noqa: E731
    if not refused:
        check_weighting(value)
        return
    with pytest.raises(
        ValueError, match=r"^sg\.weighting\.normalize=batch_mean: .*algo\.kl\.use_loss=true"
    ):
        check_weighting(value)
    args.sg.weighting["normalize"] = None
    check_weighting(value)


# -- Every correction with every weighting: each token's gradient times its factor, by hand ------


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
    terms = policy_loss(
        *batch.tensors, LossSettings(loss.weighting), coefficient=by_hand, context=loss.context
    )
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
