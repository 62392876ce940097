"""Masks and sharding: what is masked cannot matter, and how the batch is cut cannot matter."""

import math
from dataclasses import replace

import pytest
import torch

from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.analysis.token_statistics import SUM_NAMES, TokenStatistics
from sg_rlhf.algo.policy_loss import policy_loss_terms, sg_policy_loss
from sg_rlhf.algo.token_weights import weight_sum_and_count
from tests.unit.algo.batches import PUBLISHED, UNIFORM, WIDE, gradient, random_batch

EPS = (0.2, 0.24)
CFGS = [
    UNIFORM,
    PUBLISHED,
    WIDE,
    replace(WIDE, placement="outside"),
    replace(WIDE, normalize="batch_mean"),
]


def totals(batch):
    return {
        "batch_num_tokens": batch.mask.sum(),
        "global_batch_size": float((batch.mask.sum(-1) > 0).sum()),
    }


JUNK = [0.0, -1e4, 1e30, -1e30, math.inf, -math.inf, math.nan]
PLACES = ["log_probs", "old_log_probs", "advantages", "coefficient", "all"]


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("cfg", CFGS)
@pytest.mark.parametrize("place", PLACES)
def test_masked_values_do_not_matter(place, cfg, token_level):
    clean = random_batch(0, dtype=torch.float32)
    coef = torch.rand_like(clean.advantages)

    def results(batch, token_coef):
        terms = policy_loss_terms(
            *batch.tensors, cfg, *EPS, 3.0, token_level_loss=token_level, token_coef_BT=token_coef
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


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("cfg", CFGS)
def test_a_batch_without_tokens_is_zero(cfg, mask_dtype, token_level):
    batch = random_batch(0, mask_dtype=mask_dtype)
    empty = batch.with_(mask=torch.zeros_like(batch.mask))
    for given in ({}, {"batch_num_tokens": 40.0, "global_batch_size": 4.0, "dp_size": 2}):
        loss, metrics = sg_policy_loss(
            *empty.tensors, cfg, *EPS, token_level_loss=token_level, **given
        )
        assert loss.item() == 0.0
        assert torch.equal(gradient(loss, empty.log_probs), torch.zeros_like(empty.log_probs))
        assert all(value == 0.0 for value in metrics.values())


def test_aggregate_keeps_masked_nan_out():
    loss = torch.tensor([[1.0, math.nan], [3.0, math.inf]])
    mask = torch.tensor([[1, 0], [1, 0]])
    assert aggregate(loss, mask).item() == 2.0
    assert aggregate(loss, mask, token_level_loss=False).item() == 2.0


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("cfg", CFGS)
@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 4], [2, 6]], ids=str)
def test_micro_batches_add_up(cfg, token_level, cuts):
    """1 x 8 = 8 x 1: loss, gradient and statistics, with the totals of the optimizer step."""
    batch = random_batch(1)
    options = {"token_level_loss": token_level, **totals(batch)}
    if cfg.normalize:
        total, count = weight_sum_and_count(batch.log_probs, cfg, batch.mask)
        options["mean_weight"] = total / count
    whole = policy_loss_terms(*batch.tensors, cfg, *EPS, 10.0, **options)
    loss, slope, statistics, start = 0.0, 0.0, TokenStatistics.zeros(), 0
    for rows in cuts:
        part = batch.rows(slice(start, start + rows))
        terms = policy_loss_terms(*part.tensors, cfg, *EPS, 10.0, **options)
        loss, statistics = loss + terms.loss, statistics + terms.statistics
        slope = slope + gradient(terms.loss, batch.log_probs)
        start += rows
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    expected = gradient(whole.loss, batch.log_probs)
    assert torch.allclose(slope, expected, rtol=1e-12, atol=1e-15)
    assert torch.allclose(statistics.sums, whole.statistics.sums, rtol=1e-12, atol=1e-12)
    assert statistics.metrics() == pytest.approx(whole.statistics.metrics(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("token_level", [True, False])
def test_two_ranks_are_one_rank(token_level):
    """dp_size 2 with two micro-batches each; the ranks' gradients are averaged, as DDP does."""
    batch = random_batch(2)
    options = {"token_level_loss": token_level, **totals(batch)}
    whole, _ = sg_policy_loss(*batch.tensors, WIDE, *EPS, **options)
    ranks = [[slice(0, 1), slice(1, 3)], [slice(3, 7), slice(7, 8)]]
    slopes, losses = [], []
    for micro_batches in ranks:
        parts = [
            sg_policy_loss(*batch.rows(rows).tensors, WIDE, *EPS, dp_size=2, **options)[0]
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
    whole, _ = sg_policy_loss(*batch.tensors, WIDE, *EPS)
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, 8))]
    mean = sum(sg_policy_loss(*part.tensors, WIDE, *EPS)[0] for part in parts) / 2
    assert abs(mean.item() - whole.item()) > 1e-3


def test_token_coefficients_scale_the_loss():
    batch = random_batch(3)
    coef = torch.full_like(batch.advantages, 0.5)
    plain, _ = sg_policy_loss(*batch.tensors, WIDE, *EPS)
    halved, _ = sg_policy_loss(*batch.tensors, WIDE, *EPS, token_coef_BT=coef)
    assert halved.item() == pytest.approx(plain.item() / 2, rel=1e-12)
    only_first = coef.masked_fill(torch.arange(coef.shape[1]) > 0, 0.0)
    loss, _ = sg_policy_loss(*batch.tensors, WIDE, *EPS, token_coef_BT=only_first)
    slope = gradient(loss, batch.log_probs)
    assert bool((slope[:, 1:] == 0).all()) and bool((slope[:, 0] != 0).any())


def test_sums_are_float64_in_the_documented_order():
    terms = policy_loss_terms(*random_batch(0, dtype=torch.bfloat16).tensors, WIDE, *EPS)
    assert terms.statistics.sums.dtype == torch.float64
    assert terms.statistics.sums.shape == (len(SUM_NAMES),)
    assert not terms.statistics.sums.requires_grad and not terms.weights_BT.requires_grad
