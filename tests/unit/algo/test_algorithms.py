"""Every algorithm by name: GRPO where its parameter is off, its gradient, its shards, its refusals.

The weightings that are functions of p alone have tests of their own (``test_shaping.py``).
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.algo.diagnostics import TokenStatistics
from sg_rlhf.algo.lopti import PASSES, in_pass
from sg_rlhf.algo.policy_loss import OBJECTIVES, policy_loss_terms
from sg_rlhf.algo.shaping import (
    TokenWeightConfig,
    dead_zones,
    is_curve,
    token_weights,
    weight_bounds,
    weight_sum_and_count,
)
from sg_rlhf.algo.weightings import SHAPINGS, TokenContext, token_keys
from tests.unit.algo import upstream
from tests.unit.algo.batches import PROPERTY, UNIFORM, gradient, random_batch, same_bits

EPS = (0.2, 0.24)
WIDE_OPEN = (1.0, 1e30)


def context_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = batch.mask.shape
    sequences = torch.randint(0, 50, (shape[0], shape[1] + 1), generator=generator)
    valid = torch.cat([torch.ones(shape[0], 1, dtype=torch.bool), batch.mask != 0], dim=1)
    entropy = torch.rand(shape, generator=generator, dtype=torch.float64)
    return TokenContext(entropy=entropy, keys=token_keys(sequences, valid))


def rows_of(context, rows):
    return TokenContext(entropy=context.entropy[rows], keys=context.keys[rows])


def random_weight(cfg, token):
    return token["drawn"]  # what it is drawn from has tests of its own


def ar_weight(cfg, token):
    return cfg.ar_alpha * math.exp(min(token["old"], 0.0)) + 1 - cfg.ar_alpha


def stapo_weight(cfg, token):
    spurious = (
        token["A"] > 0
        and math.exp(token["log_p"]) < cfg.stapo_prob
        and token["H"] < cfg.stapo_entropy
    )
    return 0.0 if spurious else 1.0


def one(cfg, token):
    return 1.0


@dataclass(frozen=True)
class Case:
    """An algorithm, its weight by hand, and the same algorithm switched off."""

    cfg: TokenWeightConfig
    weight: object
    off: TokenWeightConfig
    objective: str = "ppo"
    off_eps: tuple[float, float] = EPS
    options: dict = field(default_factory=dict)


def weighting(name, weight, off, **settings):
    cfg = TokenWeightConfig(shaping=name, **settings)
    return Case(cfg, weight, replace(cfg, allow_constant=True, **off))


CASES = {
    "random-inside": weighting("random", random_weight, {"random_spread": 0.0}),
    "random-outside": weighting(
        "random", random_weight, {"random_spread": 0.0}, placement="outside", random_seed=7
    ),
    "ar": weighting("ar", ar_weight, {"ar_alpha": 0.0}, placement="outside"),
    "stapo": weighting(
        "stapo", stapo_weight, {"stapo_prob": 0.0}, stapo_prob=0.4, stapo_entropy=0.7
    ),
    "cispo": Case(
        replace(UNIFORM, placement="outside"),
        one,
        replace(UNIFORM, placement="outside"),
        objective="cispo",
        off_eps=WIDE_OPEN,
    ),
    "cispo-weighted": Case(
        TokenWeightConfig(shaping="ar", placement="outside"),
        ar_weight,
        TokenWeightConfig(shaping="ar", ar_alpha=0.0, placement="outside", allow_constant=True),
        objective="cispo",
        off_eps=WIDE_OPEN,
    ),
}
by_name = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def terms_of(case, batch, context, eps=EPS, cfg=None, **options):
    return policy_loss_terms(
        *batch.tensors, cfg or case.cfg, *eps, objective=case.objective, context=context, **options
    )


def test_every_name_of_the_registries_is_tested():
    with_tests_of_their_own = {"uniform", "grpo_sg", "reverse"}
    assert {case.cfg.shaping for case in CASES.values()} | with_tests_of_their_own == set(SHAPINGS)
    assert {case.objective for case in CASES.values()} == set(OBJECTIVES)
    for name, shaping in SHAPINGS.items():
        assert len(shaping.summary) > 20, name


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("token_level", [True, False])
def test_switched_off_it_is_upstream_grpo_bit_for_bit(case, dtype, token_level):
    theirs = upstream.policy_loss_class()(*case.off_eps, token_level_loss=token_level)
    for seed in range(3):
        batch = random_batch(seed, dtype=dtype)
        expected = theirs(*batch.tensors)[0]
        terms = terms_of(
            case, batch, context_of(batch), case.off_eps, case.off, token_level_loss=token_level
        )
        assert same_bits(terms.loss, expected)
        assert same_bits(gradient(terms.loss, batch.log_probs), gradient(expected, batch.log_probs))


def expected_gradient(case, token):
    """d J / d log pi by hand: w r A while the clip lets it through; for CISPO w clip(r) A."""
    weight, ratio = case.weight(case.cfg, token), math.exp(token["log_p"] - token["old"])
    if case.objective == "cispo":
        return weight * min(max(ratio, 1 - EPS[0]), 1 + EPS[1]) * token["A"]
    x = weight * ratio if case.cfg.placement == "inside" else ratio
    cut = x > 1 + EPS[1] if token["A"] > 0 else x < 1 - EPS[0]
    return 0.0 if cut and token["A"] != 0 else weight * ratio * token["A"]


@by_name
def test_gradient_is_the_closed_form(case):
    changed = 0
    for seed in range(4):
        batch = random_batch(seed, rows=12, tokens=20)
        context = context_of(batch, seed)
        terms = terms_of(case, batch, context)
        plain = policy_loss_terms(*batch.tensors, UNIFORM, *EPS)
        actual = -gradient(terms.loss, batch.log_probs) * batch.mask.sum()
        tokens = batch.mask.sum()
        difference = actual + gradient(plain.loss, batch.log_probs) * tokens
        changed += int((difference.abs() > 1e-9).sum())
        drawn = terms.weights_BT
        for at in map(tuple, batch.mask.nonzero().tolist()):
            token = {
                "log_p": batch.log_probs[at].item(),
                "old": batch.old_log_probs[at].item(),
                "A": batch.advantages[at].item(),
                "H": context.entropy[at].item(),
                "drawn": drawn[at].item(),
            }
            assert actual[at].item() == pytest.approx(
                expected_gradient(case, token), rel=1e-10, abs=1e-12
            )
    assert changed > 30  # the algorithm does something


@by_name
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 4]], ids=str)
def test_micro_batches_and_ranks_add_up(case, token_level, cuts):
    batch = random_batch(1)
    context = context_of(batch)
    totals = {
        "token_level_loss": token_level,
        "batch_num_tokens": batch.mask.sum(),
        "global_batch_size": batch.mask.any(-1).sum(),
    }
    whole = terms_of(case, batch, context, **totals)
    for ranks in (1, 2):
        loss, slope, statistics, start = 0.0, 0.0, TokenStatistics.zeros(), 0
        for size in cuts:
            rows = slice(start, start + size)
            part = terms_of(case, batch.rows(rows), rows_of(context, rows), dp_size=ranks, **totals)
            loss, statistics = loss + part.loss / ranks, statistics + part.statistics
            slope = slope + gradient(part.loss, batch.log_probs) / ranks
            start += size
        assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert torch.allclose(slope, gradient(whole.loss, batch.log_probs), rtol=1e-12, atol=1e-15)
        assert torch.allclose(statistics.sums, whole.statistics.sums, rtol=1e-12, atol=1e-12)


@by_name
def test_weights_stay_within_their_bounds(case):
    batch = random_batch(3, rows=40, tokens=30)
    weights = terms_of(case, batch, context_of(batch)).weights_BT[batch.mask]
    low, high = weight_bounds(case.cfg)
    assert low - 1e-12 <= weights.min() and weights.max() <= high + 1e-12
    assert not weights.requires_grad


@by_name
def test_zeroed_shares_are_the_zero_gradients(case):
    batch = random_batch(7, rows=20, tokens=30)
    terms = terms_of(case, batch, context_of(batch))
    zero = gradient(terms.loss, batch.log_probs) == 0
    metrics = terms.statistics.metrics()
    for sign, group in (("pos", batch.advantages > 0), ("neg", batch.advantages < 0)):
        share = zero[group & batch.mask].double().mean().item()
        assert metrics[f"zeroed_{sign}"] == pytest.approx(share, abs=1e-12)


def test_cispo_keeps_the_gradient_of_every_clipped_token():
    batch = random_batch(0, rows=20, tokens=30)
    metrics = terms_of(CASES["cispo"], batch, context_of(batch)).statistics.metrics()
    assert metrics["zeroed_pos"] == metrics["zeroed_neg"] == 0.0
    assert metrics["clip_ratio_pos"] > 0.1 and metrics["clip_ratio_neg"] > 0.1


# -- random weights ----------------------------------------------------------------------------


def padded(tokens, before, after, total=12):
    ids = [9] * before + tokens + [9] * after
    mask = [0] * before + [1] * len(tokens) + [0] * after
    return torch.tensor([ids + [9] * (total - len(ids))]), torch.tensor(
        [mask + [0] * (total - len(mask))]
    )


@PROPERTY
@given(
    tokens=st.lists(st.integers(0, 2**20), min_size=3, max_size=8),
    before=st.integers(0, 4),
    other=st.integers(0, 3),
)
def test_a_key_does_not_depend_on_the_padding(tokens, before, other):
    keys = []
    for shift in (before, other):
        sequences, mask = padded(tokens, shift, 0)
        keys.append(token_keys(sequences, mask)[0, shift : shift + len(tokens) - 1])
    assert torch.equal(*keys)
    assert len(set(keys[0].tolist())) == len(tokens) - 1


def test_keys_tell_sequences_apart():
    sequences = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 5]])
    keys = token_keys(sequences, torch.ones_like(sequences))
    assert len(set(keys.flatten().tolist())) == keys.numel()


def test_random_weights_are_uniform_independent_and_seeded():
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 1000, (200, 101), generator=generator)
    context = TokenContext(keys=token_keys(sequences, torch.ones_like(sequences)))
    log_probs = torch.zeros(200, 100, dtype=torch.float64)
    cfg = TokenWeightConfig(shaping="random")
    weights = token_weights(log_probs, cfg, context=context)
    counts = torch.histc(weights, bins=10, min=0.5, max=1.5)
    # 2,000 expected in each of 10 bins; chi-square of 9 degrees of freedom, 99.9 %: 27.9
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 27.9
    flat = weights.flatten()
    neighbours = torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03
    again = token_weights(log_probs, cfg, context=context)
    other = token_weights(log_probs, replace(cfg, random_seed=1), context=context)
    assert torch.equal(weights, again)
    assert abs(float(torch.corrcoef(torch.stack([flat, other.flatten()]))[0, 1])) < 0.03


# -- Lopti -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.5])
def test_the_two_passes_share_the_tokens(threshold):
    batch = random_batch(0)
    low, rest = (in_pass(batch.old_log_probs, threshold, name) for name in PASSES)
    assert bool((low ^ rest).all())
    assert torch.equal(low, batch.old_log_probs.exp() < threshold)


@pytest.mark.parametrize("token_level", [True, False])
def test_gradients_of_the_two_passes_add_up_to_grpo(token_level):
    """At the same parameters; the second pass of a run is made at those after the first."""
    batch = random_batch(0)
    options = {"token_level_loss": token_level}
    whole = policy_loss_terms(*batch.tensors, UNIFORM, *EPS, **options)
    parts = []
    for name in PASSES:
        active = in_pass(batch.old_log_probs, 0.5, name)
        terms = policy_loss_terms(*batch.tensors, UNIFORM, *EPS, active_BT=active, **options)
        slope = gradient(terms.loss, batch.log_probs)
        assert torch.equal(slope[~active], torch.zeros_like(slope[~active]))
        assert terms.statistics["tokens"] == (active & batch.mask).sum() > 0
        parts.append((slope, terms.statistics.sums))
    (low, low_sums), (rest, rest_sums) = parts
    assert torch.allclose(low + rest, gradient(whole.loss, batch.log_probs), rtol=1e-12)
    sequences = 0  # a response with tokens of both kinds counts in both
    assert torch.allclose(
        (low_sums + rest_sums)[sequences + 1 :], whole.statistics.sums[sequences + 1 :], atol=1e-9
    )


def test_a_pass_of_every_token_is_grpo_bit_for_bit():
    batch = random_batch(0, dtype=torch.float32)
    whole = policy_loss_terms(*batch.tensors, UNIFORM, *EPS)
    for threshold, name in ((0.0, "rest"), (1.5, "low")):
        active = in_pass(batch.old_log_probs, threshold, name)
        terms = policy_loss_terms(*batch.tensors, UNIFORM, *EPS, active_BT=active)
        assert same_bits(terms.loss, whole.loss)
        assert same_bits(
            gradient(terms.loss, batch.log_probs), gradient(whole.loss, batch.log_probs)
        )


def test_lopti_refuses_another_pass():
    with pytest.raises(ValueError, match="pass='high': expected one of low, rest"):
        in_pass(torch.zeros(1, 1), 0.5, "high")


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shaping": "ar"}, "placement='inside': expected 'outside' with shaping=ar"),
        ({"shaping": "ar", "ar_alpha": 1.5}, "ar_alpha=1.5: expected a number from 0 to 1"),
        ({"shaping": "random", "random_spread": -0.1}, "random_spread=-0.1: expected a number"),
        ({"shaping": "random", "random_spread": 0.0}, "plain GRPO"),
        ({"shaping": "stapo", "stapo_prob": 0.0}, "plain GRPO"),
        ({"shaping": "stapo", "normalize": "batch_mean"}, "normalize='batch_mean': expected null"),
        ({"shaping": "magic"}, "shaping='magic': expected one of uniform, grpo_sg"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenWeightConfig(**settings)


@pytest.mark.parametrize("name", [name for name, s in SHAPINGS.items() if s.uses])
def test_what_a_weighting_reads_must_be_there(name):
    cfg = TokenWeightConfig(shaping=name, placement="outside")
    with pytest.raises(ValueError, match=f"shaping={name}: expected .* of each token, got None"):
        token_weights(torch.zeros(1, 2), cfg)
    assert not is_curve(cfg)
    assert dead_zones(replace(cfg, placement="inside" if name != "ar" else "outside")) == (
        None,
        None,
    )


@pytest.mark.parametrize(
    ("objective", "cfg", "message"),
    [
        ("ppg", UNIFORM, "objective='ppg': expected one of ppo, cispo"),
        ("cispo", UNIFORM, "placement='inside': expected 'outside' with cispo"),
    ],
)
def test_bad_objectives_are_refused(objective, cfg, message):
    with pytest.raises(ValueError, match=message):
        policy_loss_terms(*random_batch(0).tensors, cfg, *EPS, objective=objective)


def test_normalised_random_weights_have_mean_one_over_shards():
    batch = random_batch(0)
    context = context_of(batch)
    cfg = TokenWeightConfig(shaping="random", normalize="batch_mean")
    total, count = weight_sum_and_count(batch.log_probs, cfg, batch.mask, context=context)
    weights = token_weights(
        batch.log_probs, cfg, batch.mask, mean_weight=total / count, context=context
    )
    assert weights[batch.mask].mean().item() == pytest.approx(1.0, abs=1e-12)
