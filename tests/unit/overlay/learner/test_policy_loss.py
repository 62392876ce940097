"""Losses in upstream's trainer: stock ones pass bit for bit, ours share their weights."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.models.utils import compute_approx_kl

from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import sg_policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import GrpoSG
from sg_rlhf.config import SGSettings
from sg_rlhf.config.checks.losses import check_weighting
from sg_rlhf.overlay.learner.policy_loss import PolicyLossWithStatistics, kl_dispatcher
from sg_rlhf.overlay.reporting.errors import NonFiniteError


def arguments(loss: str = "weighted_ppo", estimator: str = "wk3", **sg: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sg=SimpleNamespace(**SGSettings(**sg).model_dump()),
        actor=SimpleNamespace(policy_loss_type=loss),
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
@pytest.mark.parametrize(
    "info", [{}, {"dp_size": 2, "batch_num_tokens": 77.0, "global_batch_size": 9.0}]
)
def test_stock_losses_are_upstreams_own_bit_for_bit(
    loss_type: str, dual_clip: float | None, level: str, info: dict[str, float]
) -> None:
    def build() -> PolicyLoss:
        return PolicyLoss(
            0.2, 0.24, dual_clip=dual_clip, policy_loss_type=loss_type, is_correction_level=level
        )

    data = batch()
    expected, expected_grad = run(build(), data, **info)
    found, found_grad = run(
        PolicyLossWithStatistics(build(), arguments(loss_type, "k3")), data, **info
    )
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
    found, grad = run(loss, data, batch_num_tokens=40.0)
    log_probs = data["log_probs"].clone().requires_grad_()
    coefficient = None
    if level == "token":
        log_is = data["old_log_probs"] - data["rollout_log_probs"]
        keep = (log_is.exp() >= 0.5) & (log_is.exp() <= 5.0)
        coefficient = torch.where(keep, log_is.exp(), 0.0)
    expected, _ = sg_policy_loss(
        log_probs,
        data["old_log_probs"],
        data["advantages"],
        data["action_mask"],
        GrpoSG(upper=1.2),
        0.2,
        0.24,
        10.0,
        batch_num_tokens=40.0,
        token_coef_BT=coefficient,
    )
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
        _, grad = run(loss, data, batch_num_tokens=40.0)
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
