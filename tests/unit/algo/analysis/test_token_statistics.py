"""Statistics: each metric against a loop over tokens, merging, empty counts."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.algo.analysis.token_statistics import (
    METRIC_NAMES,
    SUM_NAMES,
    TokenStatistics,
    mismatch_statistics,
)
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from tests.unit.algo.batches import (
    PROPERTY,
    PUBLISHED,
    UNIFORM,
    WIDE,
    gradient,
    loss_and_metrics,
    random_batch,
    weight_by_hand,
)

EPS_LOW, EPS_HIGH, DUAL = 0.2, 0.24, 1.5


def tokens_of(batch, cfg):
    """(p, log ratio, A, w, w r or r) of every unmasked token, as Python numbers."""
    for at in map(tuple, batch.mask.nonzero().tolist()):
        log_p, old = batch.log_probs[at].item(), batch.old_log_probs[at].item()
        weight = weight_by_hand(math.exp(log_p), cfg)
        inside = weight if cfg.placement == "inside" else 1.0
        x = inside * math.exp(log_p - old)
        yield math.exp(log_p), log_p - old, batch.advantages[at].item(), weight, x, inside


def mean(values):
    values = list(values)
    return statistics.fmean(values) if values else 0.0


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_every_metric_by_hand(placement):
    cfg = replace(WIDE, placement=placement, upper=1.45)
    batch = random_batch(0, rows=20, tokens=30)
    terms = policy_loss(*batch.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH, DUAL))
    metrics = terms.statistics.metrics()
    tokens = list(tokens_of(batch, cfg))
    pos, neg = [t for t in tokens if t[2] > 0], [t for t in tokens if t[2] < 0]
    dual = lambda x: x > DUAL  # noqa: E731
    expected = {
        "n_tokens": len(tokens),
        "ppo_kl": -mean(t[1] for t in tokens),
        "weight_mean": mean(t[3] for t in tokens),
        "weight_std": statistics.pstdev(t[3] for t in tokens),
        "clip_ratio": mean(
            (a > 0 and x > 1.24) or (a < 0 and x < 0.8) for _, _, a, _, x, _ in tokens
        ),
        "dual_clip_ratio": mean(t[2] < 0 and dual(t[4]) for t in tokens),
        "zeroed_pos": mean(t[4] > 1.24 for t in pos),
        "zeroed_neg": mean(t[4] < 0.8 or dual(t[4]) for t in neg),
        "zeroed_pos_at_ratio1": mean(t[5] > 1.24 for t in pos),
        "w_one_minus_p_mean": mean(w * (1 - p) for p, _, _, w, _, _ in tokens),
    }
    assert tuple(metrics) == METRIC_NAMES
    ordered = sorted(t[3] for t in tokens)
    for name in [name for name in metrics if name.startswith("weight_q")]:
        level = int(name.removeprefix("weight_q")) / 100
        by_hand = ordered[math.ceil(level * len(ordered)) - 1]
        assert metrics.pop(name) == pytest.approx(by_hand, abs=(1.45 - 0.5) / 63), name
    of_mismatch = {name: metrics.pop(name) for name in metrics.copy() if "mismatch" in name}
    assert len(of_mismatch) == 8 and not any(of_mismatch.values())  # no engine's log-probs
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9)
    histogram = terms.statistics.histogram("prob_hist").tolist()
    assert histogram == [sum(min(int(20 * t[0]), 19) == i for t in tokens) for i in range(20)]
    assert len(tokens) > len(pos) + len(neg) > 0  # some tokens have A = 0
    assert metrics["zeroed_neg"] > 0 and metrics["dual_clip_ratio"] > 0
    assert (metrics["zeroed_pos_at_ratio1"] > 0) == (placement == "inside")


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("normalize", [None, "batch_mean"])
def test_zeroed_shares_are_the_zero_gradients(placement, dual_clip, normalize):
    cfg = replace(WIDE, placement=placement, normalize=normalize)
    batch = random_batch(7, rows=20, tokens=30)
    loss, metrics = loss_and_metrics(
        *batch.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH, dual_clip)
    )
    on_policy = batch.with_(old_log_probs=batch.log_probs.detach())
    loss_r1 = policy_loss(*on_policy.tensors, LossSettings(cfg, EPS_LOW, EPS_HIGH, dual_clip)).loss
    for value, suffix in ((loss, ""), (loss_r1, "_at_ratio1")):
        zero = gradient(value, batch.log_probs) == 0
        for sign, group in (("pos", batch.advantages > 0), ("neg", batch.advantages < 0)):
            share = zero[group & batch.mask].double().mean().item()
            if (name := f"zeroed_{sign}{suffix}") in metrics:
                assert metrics[name].item() == pytest.approx(share, abs=1e-12)


def test_the_dead_zone_shows_in_the_metrics():
    """Published constants: positive tokens with p > 0.211 are zeroed at ratio 1, none outside."""
    batch = random_batch(0, rows=30, tokens=30)
    metrics = policy_loss(
        *batch.tensors, LossSettings(PUBLISHED, EPS_LOW, EPS_HIGH)
    ).statistics.metric_tensors()
    positive = batch.mask & (batch.advantages > 0)
    share = (batch.log_probs.exp()[positive] > 0.2112).double().mean().item()
    assert metrics["zeroed_pos_at_ratio1"].item() == pytest.approx(share, abs=1e-12)
    assert 0.3 < share < 1.0
    outside = replace(PUBLISHED, placement="outside")
    metrics = policy_loss(
        *batch.tensors, LossSettings(outside, EPS_LOW, EPS_HIGH)
    ).statistics.metric_tensors()
    assert metrics["zeroed_pos_at_ratio1"] == 0.0


def test_uniform_weights_in_the_metrics():
    metrics = policy_loss(
        *random_batch(0).tensors, LossSettings(UNIFORM, EPS_LOW, EPS_HIGH)
    ).statistics.metric_tensors()
    assert metrics["weight_mean"] == 1.0 and metrics["weight_std"] == 0.0
    assert metrics["zeroed_pos_at_ratio1"] == 0.0


def test_the_quantiles_ignore_normalisation():
    batch = random_batch(0, rows=20, tokens=30)
    normalized = replace(PUBLISHED, normalize="batch_mean")
    plain, scaled = (
        policy_loss(*batch.tensors, LossSettings(cfg)).statistics.metrics()
        for cfg in (PUBLISHED, normalized)
    )
    for name in ("weight_q05", "weight_q95"):
        assert plain[name] == scaled[name] > 0
    assert scaled["weight_mean"] == pytest.approx(1.0) != plain["weight_mean"]


@PROPERTY
@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_property_merging_is_one_shot(seed, cuts):
    # float64: a float32 exp may differ in its last bit with the token's place in the tensor.
    batch = random_batch(seed, rows=12, tokens=6)
    options = {"total": batch.mask.sum()}
    whole = policy_loss(*batch.tensors, LossSettings(WIDE, 0.2, 0.24), **options).statistics
    edges = [0, *sorted(cuts), 12]
    parts = [
        policy_loss(
            *batch.rows(slice(a, b)).tensors, LossSettings(WIDE, 0.2, 0.24), **options
        ).statistics
        for a, b in itertools.pairwise(edges)
    ]
    merged = sum(parts, TokenStatistics.zeros())
    assert torch.allclose(merged.sums, whole.sums, rtol=1e-12, atol=1e-12)
    assert merged.metrics() == pytest.approx(whole.metrics(), rel=1e-6, abs=1e-6)


def test_summing_the_tensors_merges_ranks():
    """An all-reduce of ``sums`` is all that ranks need; means of the ranks' means would differ."""
    batch = random_batch(1)
    whole = policy_loss(*batch.tensors, LossSettings(WIDE, 0.2, 0.24)).statistics.metrics()
    parts = [batch.rows(slice(0, 2)), batch.rows(slice(2, 8))]
    ranks = [policy_loss(*part.tensors, LossSettings(WIDE, 0.2, 0.24)).statistics for part in parts]
    bounds = ranks[0].weight_bounds
    reduced = TokenStatistics(torch.stack([rank.sums for rank in ranks]).sum(0), bounds).metrics()
    assert reduced == pytest.approx(whole, rel=1e-9, abs=1e-9)
    mean_of_means = mean(rank.metrics()["weight_mean"] for rank in ranks)
    assert abs(mean_of_means - whole["weight_mean"]) > 1e-3


def test_nothing_counted_is_zero_everywhere():
    assert TokenStatistics.zeros().metrics() == dict.fromkeys(METRIC_NAMES, 0.0)


def test_a_variance_that_rounds_below_zero_is_zero():
    sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
    for name, value in (("tokens", 3.0), ("weight", 0.1 + 0.1 + 0.1), ("weight_sq", 0.03)):
        sums[SUM_NAMES.index(name)] = value
    assert sums[SUM_NAMES.index("weight_sq")] / 3 < (sums[SUM_NAMES.index("weight")] / 3) ** 2
    assert TokenStatistics(sums).metrics()["weight_std"] == 0.0


def test_no_positive_tokens_is_no_nan():
    batch = random_batch(0)
    negative = batch.with_(advantages=-batch.advantages.abs())
    metrics = policy_loss(
        *negative.tensors, LossSettings(WIDE, 0.2, 0.24)
    ).statistics.metric_tensors()
    assert metrics["zeroed_pos"] == metrics["zeroed_pos_at_ratio1"] == 0.0
    assert all(bool(value.isfinite()) for value in metrics.values())
    assert metrics["zeroed_neg"] > 0


def test_metric_tensors_are_the_metrics():
    terms = policy_loss(*random_batch(0).tensors, LossSettings(WIDE, 0.2, 0.24))
    tensors = terms.statistics.metric_tensors()
    assert {name: value.item() for name, value in tensors.items()} == terms.statistics.metrics()
    assert all(value.dim() == 0 for value in tensors.values())


def test_one_mean_is_the_metric():
    statistics = policy_loss(*random_batch(0).tensors, LossSettings(WIDE, 0.2, 0.24)).statistics
    metrics = statistics.metrics()
    for name in ("clip_ratio", "ppo_kl", "weight_mean"):
        assert statistics.mean(name).item() == metrics[name]


@pytest.mark.parametrize("cut", [1, 4])
def test_the_mismatch_with_the_engine_by_hand(cut):
    batch = random_batch(3, rows=8, tokens=12)
    old = batch.old_log_probs
    engine = old + torch.randn_like(old) * 0.3
    engine[~batch.mask] = math.nan
    shift = torch.rand_like(old)
    parts = [
        mismatch_statistics(*(x[rows] for x in (old, engine, batch.mask, shift)))
        for rows in torch.arange(len(old)).chunk(cut)
    ]
    metrics = sum(parts[1:], parts[0]).metrics()
    tokens = list(map(tuple, batch.mask.nonzero().tolist()))
    d = [old[at].item() - engine[at].item() for at in tokens]
    ratios = [math.exp(x) for x in d]
    shifts = [shift[at].item() for at in tokens]
    expected = {
        "n_mismatch_tokens": len(d),
        "mismatch_kl": -mean(d),
        "mismatch_kl_k3": mean(r - 1 - x for r, x in zip(ratios, d, strict=True)),
        "mismatch_abs_mean": mean(map(abs, d)),
        "mismatch_ess": sum(ratios) ** 2 / (len(d) * sum(r * r for r in ratios)),
        "mismatch_max": max(map(abs, d)),
        "mismatch_weight_mean": mean(shifts),
        "mismatch_weight_max": max(shifts),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_mismatch_of_no_tokens_and_of_a_wild_one():
    log_probs = torch.zeros(1, 2)
    nothing = mismatch_statistics(log_probs, log_probs, torch.zeros(1, 2, dtype=torch.bool))
    assert not any(nothing.metrics().values())
    wild = mismatch_statistics(log_probs, log_probs - 800.0, torch.ones(1, 2, dtype=torch.bool))
    metrics = wild.metrics()
    assert metrics["mismatch_max"] == 800.0 and math.isfinite(metrics["mismatch_kl_k3"])
    assert metrics["mismatch_ess"] == 1.0
