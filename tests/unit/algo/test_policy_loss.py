"""The policy loss beside upstream's, whole and in shards."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.analysis.token_statistics import SUM_NAMES, TokenStatistics
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.rollout_correction import RolloutCorrectionConfig, rollout_correction
from sg_rlhf.algo.token_weights import weight_sum_and_count
from sg_rlhf.algo.weightings import TokenContext
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.algo.weightings.uniform import Uniform
from tests.unit.algo import upstream
from tests.unit.algo.batches import (
    PUBLISHED,
    UNIFORM,
    WIDE,
    gradient,
    loss_and_metrics,
    random_batch,
    same_bits,
)  # fmt: skip

# -- Where every weight is 1, the loss is upstream's PolicyLoss: same bits in value and gradient --


ONES = [
    weighting(placement=placement, allow_constant=True)
    for weighting in (Uniform, functools.partial(GrpoSG, form="quotient"))
    for placement in ("inside", "outside")
]
EPS = (0.2, 0.24)


def totals(batch, given, mean):
    """(upstream's arguments, the total of ours, the number of ranks)."""
    if given == "none":
        return {}, None, 1
    tokens, size, ranks = batch.mask.sum(), len(batch.mask), 1
    if given == "tensor":
        tokens, size, ranks = tokens * 3, torch.tensor(19), 4
    else:
        tokens, size = float(tokens) * 7, float(size) * 5
    theirs = {"dp_size": ranks, "batch_num_tokens": tokens, "global_batch_size": size}
    return theirs, tokens if mean == "token-mean" else size, ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("dual_clip", [None, 1.5, 10.0])
@pytest.mark.parametrize("cfg", ONES, ids=lambda c: f"{c.name}-{c.placement}")
def test_weight_one_is_upstream_bit_for_bit(dtype, mean, dual_clip, cfg):
    token_level = mean == "token-mean"
    theirs = upstream.policy_loss_class()(*EPS, dual_clip=dual_clip, token_level_loss=token_level)
    for seed, mask_dtype, given in itertools.product(
        range(3), (torch.bool, torch.int64, torch.float32), ("none", "float", "tensor")
    ):
        batch = random_batch(seed, dtype=dtype, mask_dtype=mask_dtype)
        kwargs, total, ranks = totals(batch, given, mean)
        expected, clip_ratio, ppo_kl, _, _ = theirs(*batch.tensors, **kwargs)
        loss, metrics = loss_and_metrics(
            *batch.tensors, LossSettings(cfg, *EPS, dual_clip, aggregation=mean), total=total
        )
        loss = loss * ranks
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
        loss = policy_loss(*mixed.tensors, LossSettings(cfg, *EPS)).loss
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
    loss = policy_loss(*far.tensors, LossSettings(ONES[0], *EPS, 3.0)).loss
    assert same_bits(loss, expected)
    assert same_bits(gradient(loss, far.log_probs), gradient(expected, far.log_probs))


def test_published_weights_do_differ_from_upstream():
    """The comparison above can fail: a weight other than 1 changes both value and gradient."""
    batch = random_batch(0, dtype=torch.float32)
    expected = upstream.policy_loss_class()(*EPS)(*batch.tensors)[0]
    loss = policy_loss(*batch.tensors, LossSettings(PUBLISHED, *EPS)).loss
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
        loss = policy_loss(*batch.tensors, LossSettings(ONES[0], *EPS), coefficient=coef).loss
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


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aggregate_is_upstream_bit_for_bit(mean, dtype):
    theirs = upstream.aggregate_loss()
    for seed, mask_dtype, given in itertools.product(
        range(6), (torch.bool, torch.int64, torch.float32), ("none", "float", "tensor")
    ):
        batch = random_batch(seed, dtype=dtype, mask_dtype=mask_dtype)
        kwargs, total, ranks = totals(batch, given, mean)
        kwargs |= {"token_level_loss": mean == "token-mean"}
        expected = theirs(batch.advantages, batch.mask, **kwargs)
        found = aggregate(batch.advantages, batch.mask, mean, total=total) * ranks
        assert same_bits(found, expected)


# -- Masks and sharding: what is masked cannot matter, and how the batch is cut cannot matter ----


CFGS = [
    UNIFORM,
    PUBLISHED,
    WIDE,
    replace(WIDE, placement="outside"),
    replace(WIDE, normalize="batch_mean"),
]


def total_of(batch, mean):
    """Of the whole optimizer step."""
    return batch.mask.sum() if mean == "token-mean" else float((batch.mask.sum(-1) > 0).sum())


JUNK = [0.0, -1e4, 1e30, -1e30, math.inf, -math.inf, math.nan]
PLACES = ["log_probs", "old_log_probs", "advantages", "coefficient", "all"]


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("cfg", CFGS)
@pytest.mark.parametrize("place", PLACES)
def test_masked_values_do_not_matter(place, cfg, mean):
    clean = random_batch(0, dtype=torch.float32)
    coef = torch.rand_like(clean.advantages)

    def results(batch, token_coef):
        terms = policy_loss(
            *batch.tensors,
            LossSettings(cfg, *EPS, 3.0, aggregation=mean),
            coefficient=token_coef,
        )
        slope = gradient(terms.loss, batch.log_probs)
        assert bool((slope[~clean.mask] == 0).all())
        return terms.loss, slope, terms.statistics.sums, terms.weights_BT[clean.mask]

    expected = results(clean, coef)
    for junk in JUNK:

        def spoil(name, tensor, junk=junk):
            return tensor.masked_fill(~clean.mask, junk) if place in (name, "all") else tensor

        dirty = clean.with_(
            log_probs=spoil("log_probs", clean.log_probs.detach()).requires_grad_(),
            old_log_probs=spoil("old_log_probs", clean.old_log_probs),
            advantages=spoil("advantages", clean.advantages),
        )
        actual = results(dirty, spoil("coefficient", coef))
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), junk


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("cfg", CFGS)
def test_a_batch_without_tokens_is_zero(cfg, mask_dtype, mean):
    batch = random_batch(0, mask_dtype=mask_dtype)
    empty = batch.with_(mask=torch.zeros_like(batch.mask))
    for total in (None, 40.0):
        loss, metrics = loss_and_metrics(
            *empty.tensors, LossSettings(cfg, *EPS, aggregation=mean), total=total
        )
        assert loss.item() == 0.0
        assert torch.equal(gradient(loss, empty.log_probs), torch.zeros_like(empty.log_probs))
        assert all(value == 0.0 for value in metrics.values())


def test_aggregate_keeps_masked_nan_out():
    loss = torch.tensor([[1.0, math.nan], [3.0, math.inf]])
    mask = torch.tensor([[1, 0], [1, 0]])
    assert aggregate(loss, mask).item() == 2.0
    assert aggregate(loss, mask, "seq-mean").item() == 2.0


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("cfg", CFGS)
@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 4], [2, 6]], ids=str)
def test_micro_batches_add_up(cfg, mean, cuts):
    """1 x 8 = 8 x 1: loss, gradient and statistics, with the totals of the optimizer step."""
    batch = random_batch(1)
    options = {"total": total_of(batch, mean)}
    settings = LossSettings(cfg, *EPS, 10.0, aggregation=mean)
    if cfg.normalize:
        summed, count = weight_sum_and_count(batch.log_probs, cfg, batch.mask)
        options["context"] = TokenContext(mean_weight=summed / count)
    whole = policy_loss(*batch.tensors, settings, **options)
    loss, slope, statistics, start = 0.0, 0.0, TokenStatistics.zeros(), 0
    for rows in cuts:
        part = batch.rows(slice(start, start + rows))
        terms = policy_loss(*part.tensors, settings, **options)
        loss, statistics = loss + terms.loss, statistics + terms.statistics
        slope = slope + gradient(terms.loss, batch.log_probs)
        start += rows
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    expected = gradient(whole.loss, batch.log_probs)
    assert torch.allclose(slope, expected, rtol=1e-12, atol=1e-15)
    assert torch.allclose(statistics.sums, whole.statistics.sums, rtol=1e-12, atol=1e-12)
    assert statistics.metrics() == pytest.approx(whole.statistics.metrics(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
def test_two_ranks_are_one_rank(mean):
    """Two ranks with two micro-batches each; the ranks' gradients are averaged, as DDP does."""
    batch = random_batch(2)
    settings, total = LossSettings(WIDE, *EPS, aggregation=mean), total_of(batch, mean)
    whole = policy_loss(*batch.tensors, settings, total=total).loss
    ranks = [[slice(0, 1), slice(1, 3)], [slice(3, 7), slice(7, 8)]]
    slopes, losses = [], []
    for micro_batches in ranks:
        parts = [
            policy_loss(*batch.rows(rows).tensors, settings, total=total).loss * 2
            for rows in micro_batches
        ]
        losses.append(sum(parts))
        slopes.append(gradient(losses[-1], batch.log_probs))
    assert (sum(losses) / 2).item() == pytest.approx(whole.item(), rel=1e-12)
    expected = gradient(whole, batch.log_probs)
    assert torch.allclose(sum(slopes) / 2, expected, rtol=1e-12, atol=1e-15)


def test_local_means_are_not_shard_invariant():
    """Why the global totals are arguments: the mean of the shards' own means is another number."""
    batch = random_batch(1)
    whole = policy_loss(*batch.tensors, LossSettings(WIDE, *EPS)).loss
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, 8))]
    mean = sum(policy_loss(*part.tensors, LossSettings(WIDE, *EPS)).loss for part in parts) / 2
    assert abs(mean.item() - whole.item()) > 1e-3


def test_token_coefficients_scale_the_loss():
    batch = random_batch(3)
    coef = torch.full_like(batch.advantages, 0.5)
    plain = policy_loss(*batch.tensors, LossSettings(WIDE, *EPS)).loss
    halved = policy_loss(*batch.tensors, LossSettings(WIDE, *EPS), coefficient=coef).loss
    assert halved.item() == pytest.approx(plain.item() / 2, rel=1e-12)
    only_first = coef.masked_fill(torch.arange(coef.shape[1]) > 0, 0.0)
    loss = policy_loss(*batch.tensors, LossSettings(WIDE, *EPS), coefficient=only_first).loss
    slope = gradient(loss, batch.log_probs)
    assert bool((slope[:, 1:] == 0).all()) and bool((slope[:, 0] != 0).any())


def test_sums_are_float64_in_the_documented_order():
    terms = policy_loss(*random_batch(0, dtype=torch.bfloat16).tensors, LossSettings(WIDE, *EPS))
    assert terms.statistics.sums.dtype == torch.float64
    assert terms.statistics.sums.shape == (len(SUM_NAMES),)
    assert not terms.statistics.sums.requires_grad and not terms.weights_BT.requires_grad
