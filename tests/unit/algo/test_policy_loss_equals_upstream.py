"""Where every weight is 1, the loss is upstream's PolicyLoss: same bits in value and gradient."""

import functools
import itertools

import pytest
import torch

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.policy_loss import sg_policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.algo.weightings.uniform import Uniform
from tests.unit.algo import upstream
from tests.unit.algo.batches import PUBLISHED, gradient, random_batch, same_bits

ONES = [
    weighting(placement=placement, allow_constant=True)
    for weighting in (Uniform, functools.partial(GrpoSG, form="quotient"))
    for placement in ("inside", "outside")
]
EPS = (0.2, 0.24)


def totals(batch, given):
    if given == "none":
        return {}
    tokens, size = batch.mask.sum(), len(batch.mask)
    if given == "tensor":
        return {"dp_size": 4, "batch_num_tokens": tokens * 3, "global_batch_size": torch.tensor(19)}
    return {
        "dp_size": 1,
        "batch_num_tokens": float(tokens) * 7,
        "global_batch_size": float(size) * 5,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("dual_clip", [None, 1.5, 10.0])
@pytest.mark.parametrize("cfg", ONES, ids=lambda c: f"{c.name}-{c.placement}")
def test_weight_one_is_upstream_bit_for_bit(dtype, token_level, dual_clip, cfg):
    theirs = upstream.policy_loss_class()(*EPS, dual_clip=dual_clip, token_level_loss=token_level)
    for seed, mask_dtype, given in itertools.product(
        range(3), (torch.bool, torch.int64, torch.float32), ("none", "float", "tensor")
    ):
        batch = random_batch(seed, dtype=dtype, mask_dtype=mask_dtype)
        kwargs = totals(batch, given)
        expected, clip_ratio, ppo_kl, _, _ = theirs(*batch.tensors, **kwargs)
        loss, metrics = sg_policy_loss(
            *batch.tensors, cfg, *EPS, dual_clip, token_level_loss=token_level, **kwargs
        )
        assert same_bits(loss, expected)
        theirs_grad = gradient(expected, batch.log_probs)
        assert same_bits(gradient(loss, batch.log_probs), theirs_grad)
        assert theirs_grad.abs().max() > 0
        assert metrics["clip_ratio"].float() == clip_ratio.float() > 0
        assert metrics["ppo_kl"].item() == pytest.approx(ppo_kl.item(), rel=2e-2, abs=1e-2)


@pytest.mark.parametrize("cfg", ONES, ids=lambda c: f"{c.name}-{c.placement}")
def test_mixed_precision_is_upstream_bit_for_bit(cfg):
    """bfloat16 log-probs with float32 advantages; float32 log-probs, bfloat16 old ones."""
    theirs = upstream.policy_loss_class()(*EPS)
    batch = random_batch(5, dtype=torch.bfloat16)
    for mixed in (
        batch.with_(advantages=batch.advantages.float()),
        batch.with_(log_probs=batch.log_probs.detach().float().requires_grad_()),
    ):
        expected = theirs(*mixed.tensors)[0]
        loss, _ = sg_policy_loss(*mixed.tensors, cfg, *EPS)
        assert same_bits(loss, expected)
        theirs_grad = gradient(expected, mixed.log_probs)
        assert same_bits(gradient(loss, mixed.log_probs), theirs_grad)


def test_ratios_beyond_the_log_ratio_limit_are_upstream_bit_for_bit():
    theirs = upstream.policy_loss_class()(*EPS, dual_clip=3.0)
    batch = random_batch(2, dtype=torch.float32)
    old = batch.old_log_probs.clone()
    old[0] -= 30.0
    old[1] += 30.0
    far = batch.with_(old_log_probs=old)
    expected = theirs(*far.tensors)[0]
    loss, _ = sg_policy_loss(*far.tensors, ONES[0], *EPS, 3.0)
    assert same_bits(loss, expected)
    assert same_bits(gradient(loss, far.log_probs), gradient(expected, far.log_probs))


def test_published_weights_do_differ_from_upstream():
    """The comparison above can fail: a weight other than 1 changes both value and gradient."""
    batch = random_batch(0, dtype=torch.float32)
    expected = upstream.policy_loss_class()(*EPS)(*batch.tensors)[0]
    loss, _ = sg_policy_loss(*batch.tensors, PUBLISHED, *EPS)
    assert not same_bits(loss, expected)
    assert not same_bits(gradient(loss, batch.log_probs), gradient(expected, batch.log_probs))


CORRECTIONS = [
    ("token", "mask", "ratio", (0.8, 1.2)),
    ("token", "clip", "ratio", (0.8, 1.2)),
    ("seq", "mask", "ratio", (0.95, 1.05)),
    ("token", "mask", "binary_kl", (0.0, 0.02)),
    ("seq", "mask", "binary_kl", (0.0, 0.02)),
    ("token", "mask", "binary_kl", (0.0, 1e-5)),  # reaches down to the floor on probabilities
    ("token", "mask", "tv", (0.0, 0.05)),
    ("seq", "mask", "tv", (0.0, 0.05)),
    ("off", "mask", "ratio", (0.5, 5.0)),
    ("off", "mask", "tv", (0.5, 5.0)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("level", "mode", "gating", "threshold"), CORRECTIONS)
def test_rollout_correction_is_upstream_bit_for_bit(dtype, level, mode, gating, threshold):
    theirs = upstream.policy_loss_class()(
        *EPS,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=threshold,
    )
    cfg = RolloutCorrectionConfig(level, mode, gating, threshold)
    filtered = []
    for seed, mask_dtype in itertools.product(range(6), (torch.bool, torch.int64, torch.float32)):
        batch = random_batch(seed, dtype=dtype, mask_dtype=mask_dtype)
        # Upstream's KL is NaN where a bfloat16 probability rounds to 1, masked or not.
        batch = batch.with_(old_log_probs=(batch.old_log_probs * 2).clamp(max=-0.02))
        noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed + 99))
        rollout = (batch.old_log_probs + 0.2 * noise.to(dtype)).clamp(max=-0.02)
        expected, _, _, vllm_kl, filter_ratio = theirs(*batch.tensors, rollout_log_probs=rollout)
        coef, metrics = rollout_correction(batch.old_log_probs, rollout, batch.mask, cfg)
        loss, _ = sg_policy_loss(*batch.tensors, ONES[0], *EPS, token_coef_BT=coef)
        assert same_bits(loss, expected)
        theirs_grad = gradient(expected, batch.log_probs)
        assert same_bits(gradient(loss, batch.log_probs), theirs_grad)
        if level == "off":
            assert coef is None and metrics == {} and vllm_kl is None
        else:
            assert same_bits(metrics["vllm_kl"], vllm_kl)
            assert same_bits(metrics["is_filter_ratio"], filter_ratio)
            filtered.append(filter_ratio.item())
    assert level == "off" or any(0.0 < share < 1.0 for share in filtered)


@pytest.mark.parametrize(
    ("level", "mode", "gating", "threshold"),
    [
        ("tokens", "mask", "ratio", (0.5, 5.0)),
        ("token", "drop", "ratio", (0.5, 5.0)),
        ("token", "mask", "kl", (0.5, 5.0)),
        ("seq", "clip", "ratio", (0.5, 5.0)),
        ("token", "clip", "tv", (0.0, 5.0)),
        ("token", "mask", "tv", (0.5, 5.0)),
        ("seq", "mask", "binary_kl", (0.5, 5.0)),
    ],
)
def test_what_upstream_refuses_is_refused(level, mode, gating, threshold):
    with pytest.raises(ValueError, match="is_correction"):
        upstream.policy_loss_class()(
            is_correction_level=level,
            is_correction_mode=mode,
            is_correction_gating=gating,
            is_correction_threshold=threshold,
        )
    with pytest.raises(ValueError, match="expected"):
        RolloutCorrectionConfig(level, mode, gating, threshold)


def test_correction_needs_rollout_log_probs():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="rollout_log_probs=None: expected a tensor"):
        rollout_correction(
            batch.old_log_probs, None, batch.mask, RolloutCorrectionConfig(level="token")
        )


@pytest.mark.parametrize(("level", "mode", "gating", "threshold"), CORRECTIONS[:5])
def test_correction_ignores_masked_values(level, mode, gating, threshold):
    cfg = RolloutCorrectionConfig(level, mode, gating, threshold)
    batch = random_batch(3, empty_row=False)
    old = batch.old_log_probs.clamp(max=-0.02)
    rollout = old - 0.01
    expected, metrics = rollout_correction(old, rollout, batch.mask, cfg)
    assert expected[batch.mask].max() > 0
    for spoiled in (
        (old, rollout.masked_fill(~batch.mask, float("nan"))),
        (old.masked_fill(~batch.mask, float("inf")), rollout),
    ):
        coef, metrics_spoiled = rollout_correction(*spoiled, batch.mask, cfg)
        assert torch.equal(coef[batch.mask], expected[batch.mask])
        assert bool(coef.isfinite().all()) and not coef.requires_grad
        assert metrics == metrics_spoiled


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aggregate_is_upstream_bit_for_bit(token_level, dtype):
    theirs = upstream.aggregate_loss()
    for seed, mask_dtype, given in itertools.product(
        range(6), (torch.bool, torch.int64, torch.float32), ("none", "float", "tensor")
    ):
        batch = random_batch(seed, dtype=dtype, mask_dtype=mask_dtype)
        kwargs = {"token_level_loss": token_level, **totals(batch, given)}
        expected = theirs(batch.advantages, batch.mask, **kwargs)
        assert same_bits(aggregate(batch.advantages, batch.mask, **kwargs), expected)
