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

from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import WEIGHTINGS, GrpoSG, TokenContext
from sg_rlhf.config import ConfigError, SGSettings, load_config
from sg_rlhf.config.checks.losses import check_weighting
from sg_rlhf.config.sg_settings import CORRECTIONS
from sg_rlhf.overlay.learner.policy_loss import (
    LossBatch,
    MicroBatchLoss,
    PolicyOutput,
    RolloutConstants,
    UpdateLossSettings,
    loss_settings,
    micro_batch_loss,
)  # fmt: skip
from sg_rlhf.overlay.learner.replay_buffer import Denominators
from tests.unit.algo.batches import random_batch
from tests.unit.algo.test_algorithms import context_of

# -- Losses in upstream's trainer: stock ones pass bit for bit, ours share their weights ---------


def arguments(loss: str = "weighted_ppo", estimator: str = "wk3", **sg: Any) -> SimpleNamespace:
    kl = SimpleNamespace(estimator=estimator, use_loss=True, unbiased_gradient=False)
    return SimpleNamespace(
        sg=SimpleNamespace(**SGSettings(**sg).model_dump()),
        actor=SimpleNamespace(
            policy_loss_type=loss, loss_agg_mode="token-mean", entropy_coef=None, aux_loss_coef=0.0
        ),
        algo=SimpleNamespace(kl=kl),
    )


def tensors(seed: int = 0) -> LossBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 13)
    old = -torch.rand(shape, generator=generator) * 4
    mask = (torch.rand(shape, generator=generator) > 0.2).long()
    return LossBatch(
        mask_BT=mask,
        advantages_BT=torch.randn((4, 1), generator=generator).expand(shape).clone(),
        old_log_probs_BT=old,
        engine_log_probs_BT=old + torch.randn(shape, generator=generator) * 0.1,
    )


def log_probs_near(batch: LossBatch, seed: int = 99) -> torch.Tensor:
    assert batch.old_log_probs_BT is not None
    noise = torch.randn(batch.mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    return (batch.old_log_probs_BT + 0.3 * noise).requires_grad_()


def run(
    upstream: PolicyLoss,
    args: Any,
    batch: LossBatch,
    rollout: RolloutConstants = RolloutConstants(),  # noqa: B008
) -> tuple[MicroBatchLoss, torch.Tensor]:
    """The loss of a batch, and its gradient in the log-probs."""
    log_probs = log_probs_near(batch)
    settings = loss_settings(args, upstream)
    output = micro_batch_loss(batch, PolicyOutput(log_probs), settings, rollout)
    (gradient,) = torch.autograd.grad(output.loss, log_probs)
    return output, gradient


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("level", ["off", "token", "seq"])
@pytest.mark.parametrize("denominators", [Denominators(), Denominators(2, 77.0, 9.0)])
def test_stock_losses_are_upstreams_own_bit_for_bit(
    loss_type: str, dual_clip: float | None, level: str, denominators: Denominators
) -> None:
    upstream = PolicyLoss(
        0.2, 0.24, dual_clip=dual_clip, policy_loss_type=loss_type, is_correction_level=level
    )
    batch = dataclasses.replace(tensors(), denominators=denominators)
    log_probs = log_probs_near(batch)
    expected, *figures = upstream(
        log_probs, batch.old_log_probs_BT, batch.advantages_BT, action_mask=batch.mask_BT,
        rollout_log_probs=batch.engine_log_probs_BT, dp_size=denominators.ranks,
        batch_num_tokens=denominators.tokens, global_batch_size=denominators.responses,
    )  # fmt: skip
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    output, gradient = run(upstream, arguments(loss_type, "k3"), batch)
    assert torch.equal(output.policy_loss, expected) and torch.equal(gradient, expected_gradient)
    names = ("ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
    for name, theirs in zip(names, figures, strict=True):
        ours = output.metrics.get(name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name


@pytest.mark.parametrize("level", ["off", "token"])
def test_ours_is_the_pure_loss_with_upstreams_settings(level: str) -> None:
    batch = dataclasses.replace(tensors(1), denominators=Denominators(2, 40.0))
    upstream = PolicyLoss(
        0.2, 0.24, dual_clip=10.0, policy_loss_type="weighted_ppo", is_correction_level=level
    )
    args = arguments(weighting={"type": "grpo_sg", "upper": 1.2})
    output, gradient = run(upstream, args, batch)
    log_probs, coefficient = log_probs_near(batch), None
    assert batch.old_log_probs_BT is not None and batch.engine_log_probs_BT is not None
    if level == "token":
        log_is = batch.old_log_probs_BT - batch.engine_log_probs_BT
        keep = (log_is.exp() >= 0.5) & (log_is.exp() <= 5.0)
        coefficient = torch.where(keep, log_is.exp(), 0.0)
    expected = policy_loss(
        log_probs,
        batch.old_log_probs_BT,
        batch.advantages_BT,
        batch.mask_BT,
        LossSettings(GrpoSG(upper=1.2), 0.2, 0.24, 10.0),
        total=40.0,
        coefficient=coefficient,
    ).loss
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    assert torch.equal(output.policy_loss, 2 * expected)
    assert torch.allclose(gradient, 2 * expected_gradient)
    assert ("vllm_kl" in output.metrics) == (level != "off")


def test_statistics_add_up_over_micro_batches() -> None:
    upstream, batch = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo"), tensors(2)
    settings, log_probs = loss_settings(arguments(), upstream), log_probs_near(batch)

    def statistics(rows: slice) -> TokenStatistics:
        part = LossBatch(
            *(None if x is None else x[rows] for x in dataclasses.astuple(batch)[:5])  # type: ignore[arg-type]
        )
        policy = PolicyOutput(log_probs[rows])
        return micro_batch_loss(part, policy, settings, RolloutConstants()).statistics

    expected = statistics(slice(None)).metrics()
    found = sum((statistics(slice(i, i + 1)) for i in range(4)), TokenStatistics.zeros()).metrics()
    assert found.keys() == expected.keys()
    assert expected["n_tokens"] == float(batch.mask_BT.sum())
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("loss_type", ["ppo", "weighted_ppo"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "wk3"])
def test_the_kl_of_the_loss(loss_type: str, estimator: str, unbiased: bool) -> None:
    """Upstream's estimators bit for bit; a weighted one with the weights of the policy loss."""
    batch = dataclasses.replace(tensors(3), reference_log_probs_BT=tensors(4).old_log_probs_BT)
    args = arguments(loss_type, estimator, weighting={"type": "grpo_sg", "upper": 1.2})
    args.algo.kl.unbiased_gradient = unbiased
    output, _ = run(
        PolicyLoss(0.2, 0.24, policy_loss_type=loss_type), args, batch, RolloutConstants(0.5)
    )
    log_probs = log_probs_near(batch).detach()
    given = (log_probs, batch.reference_log_probs_BT)
    if estimator == "wk3":
        weights = token_weights(log_probs, GrpoSG(upper=1.2), batch.mask_BT)
        expected = kl_estimate(*given, weights, "wk3")  # type: ignore[arg-type]
    else:
        expected = compute_approx_kl(*given, batch.old_log_probs_BT, estimator, unbiased)
    mean = (expected * batch.mask_BT).sum() / batch.mask_BT.sum()
    assert torch.equal(output.terms["kl"], mean)
    assert torch.allclose(output.loss, output.policy_loss + 0.5 * mean)
    difference = (given[0] - tensors(4).old_log_probs_BT)[batch.mask_BT.bool()].mean()
    assert output.metrics["logprobs_diff"] == pytest.approx(difference.item(), rel=1e-5)


def test_the_loss_changes_nothing_that_it_is_given() -> None:
    """Two calls give the same bits: no call leaves anything behind for the next."""
    batch = tensors(5)
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo")
    first, gradient = run(upstream, arguments(), batch)
    run(upstream, arguments(weighting={"type": "uniform"}), tensors(6))
    again, gradient_again = run(upstream, arguments(), batch)
    assert torch.equal(first.loss, again.loss) and torch.equal(gradient, gradient_again)
    assert torch.equal(first.statistics.sums, again.statistics.sums)


def test_a_pass_of_lopti_leaves_the_other_tokens_out_of_loss_kl_and_statistics() -> None:
    reference = tensors(9).old_log_probs_BT
    batch = dataclasses.replace(
        tensors(8), reference_log_probs_BT=reference, denominators=Denominators(tokens=40.0)
    )
    args = arguments(
        estimator="k3", weighting={"type": "uniform"}, update="lopti", lopti_threshold=0.3
    )
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo")
    assert batch.old_log_probs_BT is not None
    low, mask = batch.old_log_probs_BT.exp() < 0.3, batch.mask_BT.bool()
    plain = compute_approx_kl(log_probs_near(batch).detach(), reference, None, "k3")
    for name, active in (("low", low), ("rest", ~low)):
        output, gradient = run(upstream, args, batch, RolloutConstants(1e-9, lopti_pass=name))
        assert torch.equal(gradient[~(active & mask)], torch.zeros_like(gradient[~(active & mask)]))
        assert bool((gradient != 0).any())
        assert output.terms["kl"] == pytest.approx(float(plain[active & mask].sum()) / 40.0)
        assert output.statistics["tokens"] == (active & mask).sum() > 0
        assert output.statistics["mismatch_tokens"] == (active & mask).sum()
        # The engine is compared with the trainer over all of them.
        assert output.mismatch is not None and output.mismatch["mismatch_tokens"] == mask.sum()


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
) -> tuple[UpdateLossSettings, TokenContext, MicroBatchLoss, torch.Tensor]:
    given = {f"is_correction_{key}": value for key, value in case.items()}
    upstream = PolicyLoss(0.2, 0.24, policy_loss_type="weighted_ppo", **given)
    settings = loss_settings(arguments(weighting={"type": weighting}), upstream)
    context = context_of(batch)
    loss_batch = LossBatch(
        mask_BT=batch.mask,
        advantages_BT=batch.advantages,
        old_log_probs_BT=batch.old_log_probs,
        engine_log_probs_BT=engine,
        keys_BT=context.keys,
    )
    log_probs = batch.log_probs.detach().clone().requires_grad_()
    rollout = RolloutConstants(
        entropy_threshold=context.entropy_threshold,  # type: ignore[arg-type]
        surprisal_cuts=context.surprisal_cuts,
    )
    policy = PolicyOutput(log_probs, context.entropy)
    output = micro_batch_loss(loss_batch, policy, settings, rollout)
    (gradient,) = torch.autograd.grad(output.loss, log_probs)
    return settings, dataclasses.replace(context, engine_log_probs=engine), output, gradient


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_a_correction_scales_each_tokens_gradient(name: str, weighting: str) -> None:
    case = CASES[name]
    batch = random_batch(5, rows=12, tokens=16)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    engine = batch.old_log_probs.detach() + noise.to(batch.old_log_probs.dtype)
    *_, plain, gradient = loss_and_gradient({}, weighting, batch, engine)
    settings, context, found, corrected = loss_and_gradient(case, weighting, batch, engine)
    rows = [
        factors(case, *row)
        for row in zip(
            batch.old_log_probs.tolist(), engine.tolist(), batch.mask.tolist(), strict=True
        )
    ]
    by_hand = torch.tensor([given for given, _ in rows], dtype=torch.float64)
    expected = torch.where(batch.mask, gradient * by_hand.to(gradient.dtype), 0.0)
    assert torch.allclose(corrected, expected, rtol=1e-5, atol=1e-9)
    output = policy_loss(*batch.tensors, settings.policy, coefficient=by_hand, context=context)
    assert float(found.policy_loss) == pytest.approx(output.loss.item(), rel=1e-6)
    outside = torch.tensor([out for _, out in rows])
    # Of the responses where they are what is kept or dropped, else of the tokens.
    counted = outside[:, 0] if case["level"] == "seq" else outside[batch.mask]
    share = counted.double().mean().item()
    assert 0 < share < 1 and float(found.metrics["is_filter_ratio"]) == pytest.approx(share)
    assert found.loss.item() != plain.loss.item()
    # What the row says of the mismatch does not depend on the correction.
    without, with_it = (one.statistics.metrics() for one in (plain, found))
    keys = [key for key in without if "mismatch" in key]
    assert {key: without[key] for key in keys} == {key: with_it[key] for key in keys}
    assert without["n_mismatch_tokens"] == int(batch.mask.sum())
    assert 0.0 < without["mismatch_ess"] < 1.0
    assert without["mismatch_max"] == pytest.approx(noise[batch.mask].abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("weighting", ["grpo_sg", "uniform"])
def test_what_the_mismatch_does_to_the_weight_is_within_its_slope(weighting: str) -> None:
    batch = random_batch(6, rows=12, tokens=16)
    engine = batch.old_log_probs.detach() + 0.05
    settings, _, output, _ = loss_and_gradient({}, weighting, batch, engine)
    metrics = output.statistics.metrics()
    p = torch.linspace(0.0, 1.0, 100_001, dtype=torch.float64)
    w = settings.weighting.curve(p)
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
