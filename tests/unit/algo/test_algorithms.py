"""Every algorithm by name: GRPO where its parameter is off, its gradient, its shards, its refusals.

The weightings that are functions of p alone and their bounds are in ``test_token_weights.py``.
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.algo.aggregation import AGGREGATIONS, prompt_token_counts
from sg_rlhf.algo.analysis.gradient_dead_zones import dead_zones
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.algo.lopti import PASSES, in_pass
from sg_rlhf.algo.objectives import OBJECTIVES, Objective, make_objective
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights, weight_sum_and_count
from sg_rlhf.algo.weightings import (
    WEIGHTINGS,
    GrpoSG,
    TokenContext,
    Uniform,
    Weighting,
    make_weighting,
    token_keys,
)
from tests.unit.algo import upstream
from tests.unit.algo.batches import (
    PROPERTY,
    UNIFORM,
    gradient,
    random_batch,
    same_bits,
    weight_by_hand,
)

EPS = (0.2, 0.24)
WIDE_OPEN = (1.0, 1e30)
THRESHOLD = 0.6
#: Least surprisal of the tokens that `stare` takes, with A > 0 and A < 0.
CUTS = (0.9, 1.4)


def context_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = batch.mask.shape
    sequences = torch.randint(0, 50, (shape[0], shape[1] + 1), generator=generator)
    valid = torch.cat([torch.ones(shape[0], 1, dtype=torch.bool), batch.mask != 0], dim=1)
    entropy = torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return TokenContext(
        entropy=entropy,
        keys=token_keys(sequences, valid),
        engine_log_probs=batch.old_log_probs.detach().double() + noise,
        entropy_threshold=THRESHOLD,
        surprisal_cuts=torch.tensor(CUTS),
    )


def rows_of(context, rows):
    return replace(
        context,
        entropy=context.entropy[rows],
        keys=context.keys[rows],
        engine_log_probs=context.engine_log_probs[rows],
    )


# Each weight by hand, of a weighting and a token {log_p, old, A, H, engine, drawn}.


def random_weight(cfg, token):
    return token["drawn"]  # what it is drawn from has tests of its own


def ar_weight(cfg, token):
    return cfg.alpha * math.exp(min(token["old"], 0.0)) + 1 - cfg.alpha


def reshape_reversed_weight(cfg, token):
    return 1 + cfg.c - cfg.c * math.exp(min(token["old"], 0.0))


def stapo_weight(cfg, token):
    unlikely = math.exp(token["log_p"]) < cfg.prob
    return 0.0 if token["A"] > 0 and unlikely and token["H"] < cfg.entropy else 1.0


def stare_weight(cfg, token):
    if token["A"] == 0:
        return 1.0
    rare = -token["old"] >= CUTS[0 if token["A"] > 0 else 1]
    return (cfg.raised if token["A"] > 0 else cfg.lowered) if rare else 1.0


def mask_only_weight(cfg, token):
    """By the gradient of Eq. 13: 0 where that has none and GRPO has one."""
    ratio = math.exp(min(token["log_p"], 0.0) - min(token["old"], 0.0))
    x = weight_by_hand(math.exp(min(token["log_p"], 0.0)), cfg) * ratio
    eq13 = x > 1 + EPS[1] if token["A"] > 0 else x < 1 - EPS[0]
    grpo = ratio > 1 + EPS[1] if token["A"] > 0 else ratio < 1 - EPS[0]
    return 0.0 if token["A"] != 0 and eq13 and not grpo else 1.0


def negative_only_weight(cfg, token):
    return cfg.positive if token["A"] > 0 else 1.0


def positive_only_weight(cfg, token):
    return cfg.negative if token["A"] < 0 else 1.0


def top_entropy_weight(cfg, token):
    return 1.0 if token["H"] >= THRESHOLD else 0.0


def sg_weight(cfg, token):
    return weight_by_hand(math.exp(min(token["log_p"], 0.0)), cfg)


def engine_weight(cfg, token):
    return weight_by_hand(math.exp(min(token["engine"], 0.0)), cfg)


def centred_weight(cfg, token):
    p = math.exp(min(token["log_p"], 0.0))
    return min(max(cfg.alpha / (1 + math.exp(-cfg.tau * (p - cfg.mu))), cfg.lower), cfg.upper)


def matched_weight(cfg, token):
    """Mean and variance of the published weight and of p^k over uniform p, by a sum."""
    n, k = 20_000, getattr(cfg, "exponent", 1.0)
    probs = [(i + 0.5) / n for i in range(n)]
    key = (cfg.name, k)
    if key not in _MOMENTS:
        w, g = [weight_by_hand(p, cfg) for p in probs], [p**k for p in probs]
        mean_w, mean_g = math.fsum(w) / n, math.fsum(g) / n
        var_w = math.fsum((x - mean_w) ** 2 for x in w)
        var_g = math.fsum((x - mean_g) ** 2 for x in g)
        b = math.sqrt(var_w / var_g)
        _MOMENTS[key] = mean_w - b * mean_g, b
    a, b = _MOMENTS[key]
    return a + b * math.exp(min(token["log_p"], 0.0)) ** k


_MOMENTS: dict = {}


def one(cfg, token):
    return 1.0


# Each gradient d J / d log pi by hand, of a weight, a ratio, A and p_old.


def ppo_slope(objective, placement, w, r, a, old_p):
    """w r A while the clip lets it through."""
    x = w * r if placement == "inside" else r
    cut = x > 1 + EPS[1] if a > 0 else x < 1 - EPS[0]
    return 0.0 if cut and a != 0 else w * r * a


def cispo_slope(objective, placement, w, r, a, old_p):
    return w * min(max(r, 1 - EPS[0]), 1 + EPS[1]) * a


def aspo_slope(objective, placement, w, r, a, old_p):
    if a <= 0:
        return ppo_slope(objective, placement, w, r, a, old_p)
    return 0.0 if r > 1 + EPS[1] else w * min(1 / r, objective.cap) * a


def sapo_slope(objective, placement, w, r, a, old_p):
    tau = objective.tau_positive if a > 0 else objective.tau_negative
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return w * r * a * 4 * s * (1 - s)


def dppo_slope(objective, placement, w, r, a, old_p):
    p = min(old_p * r, 1.0)
    if objective.name == "dppo_tv":
        distance = abs(p - old_p)
    else:
        rest = 0.0 if old_p == 1 else math.inf
        if old_p < 1 and p < 1:
            rest = (1 - old_p) * math.log((1 - old_p) / (1 - p))
        distance = old_p * math.log(old_p / p) + rest
    limit = objective.delta_high if a > 0 else objective.delta_low
    away = p > old_p if a > 0 else p < old_p
    return 0.0 if a == 0 or (away and distance > limit) else w * min(r, objective.cap) * a


def ipo_slope(objective, placement, w, r, a, old_p):
    moved = abs(min(old_p * r, 1.0) - old_p)
    return 0.0 if a != 0 and moved > objective.eps else w * min(r, objective.cap) * a


SLOPES = {
    "ppo": ppo_slope, "cispo": cispo_slope, "aspo": aspo_slope, "sapo": sapo_slope,
    "dppo_tv": dppo_slope, "dppo_kl": dppo_slope, "ipo": ipo_slope,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An algorithm, its weight by hand, and the same algorithm switched off.

    off_eps: the clip of upstream's loss that it then equals. on_policy: it does so at r = 1 alone.
    """

    cfg: Weighting
    weight: object
    off: Weighting
    objective: Objective = field(default_factory=lambda: make_objective("ppo"))
    off_objective: Objective | None = None
    off_eps: tuple[float, float] = EPS
    on_policy: bool = False


def weighting(name, weight, off, **settings):
    cfg = make_weighting(name, settings)
    return Case(cfg, weight, replace(cfg, allow_constant=True, **off))


def objective(name, off=None, weight=one, cfg=None, off_cfg=None, **options):
    cfg = cfg or Uniform(placement="outside")
    made = make_objective(name)
    off_objective = replace(made, **(off or {}))
    return Case(cfg, weight, off_cfg or cfg, made, off_objective, **options)


AR = make_weighting("ar")
FLAT = {"lower": 1.0, "upper": 1.0}
CASES = {
    "random-inside": weighting("random", random_weight, {"spread": 0.0}),
    "random-outside": weighting(
        "random", random_weight, {"spread": 0.0}, placement="outside", seed=7
    ),
    "ar": weighting("ar", ar_weight, {"alpha": 0.0}),
    "reshape_reversed": weighting("reshape_reversed", reshape_reversed_weight, {"c": 0.0}),
    "stapo": weighting("stapo", stapo_weight, {"prob": 0.0}, prob=0.4, entropy=0.7),
    "stare": weighting(
        "stare", stare_weight, {"raised": 1.0, "lowered": 1.0}, raised=1.5, lowered=0.4
    ),
    "mask_only": weighting("mask_only", mask_only_weight, FLAT, lower=0.5, upper=1.5),
    "negative_only": weighting("negative_only", negative_only_weight, {"positive": 1.0}),
    "w_reinforce": weighting(
        "negative_only", negative_only_weight, {"positive": 1.0}, positive=0.1
    ),
    "positive_only": weighting("positive_only", positive_only_weight, {"negative": 1.0}),
    "top_entropy": weighting("top_entropy", top_entropy_weight, {"share": 1.0}),
    "linear": weighting("linear", matched_weight, FLAT, placement="outside"),
    "power": weighting("power", matched_weight, FLAT, exponent=2.5),
    "centred": weighting("centred", centred_weight, FLAT, lower=0.5, upper=1.5),
    "grpo_sg": weighting("grpo_sg", sg_weight, FLAT, lower=0.5, upper=1.5),
    "grpo_sg-engine": weighting(
        "grpo_sg", engine_weight, FLAT, lower=0.5, upper=1.5, probability="engine"
    ),
    "cispo": objective("cispo", off_eps=WIDE_OPEN),
    "cispo-weighted": objective(
        "cispo", weight=ar_weight, cfg=AR, off_eps=WIDE_OPEN,
        off_cfg=replace(AR, alpha=0.0, allow_constant=True),
    ),
    "aspo": objective("aspo", on_policy=True),
    "aspo-weighted": objective(
        "aspo", weight=ar_weight, cfg=AR, on_policy=True,
        off_cfg=replace(AR, alpha=0.0, allow_constant=True),
    ),
    "sapo": objective("sapo", {"tau_positive": 1.0, "tau_negative": 1.0}, on_policy=True),
    "dppo_tv": objective("dppo_tv", {"delta_low": 1.0, "delta_high": 1.0}, off_eps=WIDE_OPEN),
    "dppo_kl": objective("dppo_kl", {"delta_low": 1e9, "delta_high": 1e9}, off_eps=WIDE_OPEN),
    "ipo": objective("ipo", {"eps": 1.0}, off_eps=WIDE_OPEN),
}  # fmt: skip
by_name = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def terms_of(case, batch, context, eps=EPS, mean="token-mean", **options):
    return policy_loss(
        *batch.tensors,
        LossSettings(case.cfg, *eps, objective=case.objective, aggregation=mean),
        context=context,
        **options,
    )


def test_every_name_of_the_registries_is_tested():
    with_tests_of_their_own = {"uniform", "reverse"}
    assert {case.cfg.name for case in CASES.values()} | with_tests_of_their_own == set(WEIGHTINGS)
    assert {case.objective.name for case in CASES.values()} == set(OBJECTIVES) == set(SLOPES)
    for registered in (*WEIGHTINGS.values(), *OBJECTIVES.values()):
        assert len(registered.summary()) > 20 and registered.source, registered.name
        assert all(allowed.about for allowed in registered.ranges().values()), registered.name


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
def test_switched_off_it_is_upstream_grpo_bit_for_bit(case, dtype, mean):
    theirs = upstream.policy_loss_class()(*case.off_eps, token_level_loss=mean == "token-mean")
    for seed in range(3):
        batch = random_batch(seed, dtype=dtype)
        context = context_of(batch)
        if case.cfg.name == "top_entropy":  # a share of 1 takes the lowest entropy as threshold
            context = replace(context, entropy_threshold=0.0)
        if case.on_policy:
            batch = batch.with_(old_log_probs=batch.log_probs.detach().clone())
        expected = theirs(*batch.tensors)[0]
        settings = LossSettings(
            case.off, *case.off_eps, objective=case.off_objective or case.objective,
            aggregation=mean,
        )  # fmt: skip
        terms = policy_loss(*batch.tensors, settings, context=context)
        assert same_bits(terms.loss, expected)
        assert same_bits(gradient(terms.loss, batch.log_probs), gradient(expected, batch.log_probs))


def expected_gradient(case, token):
    ratio, old_p = math.exp(token["log_p"] - token["old"]), math.exp(min(token["old"], 0.0))
    slope = SLOPES[case.objective.name]
    weight = case.weight(case.cfg, token)
    return slope(case.objective, case.cfg.placement, weight, ratio, token["A"], old_p)


def case_tolerance(case):
    # The matched weights' moments are sums over other points than the code's.
    return 1e-6 if case.weight is matched_weight else 1e-10


@by_name
def test_gradient_is_the_closed_form(case):
    changed = 0
    for seed in range(4):
        batch = random_batch(seed, rows=12, tokens=20)
        context = context_of(batch, seed)
        terms = terms_of(case, batch, context)
        plain = policy_loss(*batch.tensors, LossSettings(UNIFORM, *EPS))
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
                "engine": context.engine_log_probs[at].item(),
                "drawn": drawn[at].item(),
            }
            assert actual[at].item() == pytest.approx(
                expected_gradient(case, token), rel=case_tolerance(case), abs=1e-12
            )
    assert changed > 30  # the algorithm does something


@by_name
@pytest.mark.parametrize("mean", AGGREGATIONS)
@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 4]], ids=str)
def test_micro_batches_add_up(case, mean, cuts):
    batch = random_batch(1)
    context = context_of(batch)
    totals = {"total": batch.mask.sum() if mean == "token-mean" else batch.mask.any(-1).sum()}
    counts = None
    if mean == "prompt-mean":
        prompts = torch.tensor([7, 3, 7, 3, 3, 9, 7, 9])  # cuts split their responses
        counts = totals["prompt_tokens"] = prompt_token_counts(batch.mask, prompts)
        totals["total"] = 3
    whole = terms_of(case, batch, context, mean=mean, **totals)
    loss, slope, statistics, start = 0.0, 0.0, TokenStatistics.zeros(), 0
    for size in cuts:
        rows = slice(start, start + size)
        if counts is not None:
            totals["prompt_tokens"] = counts[rows]
        part = terms_of(case, batch.rows(rows), rows_of(context, rows), mean=mean, **totals)
        loss, statistics = loss + part.loss, statistics + part.statistics
        slope = slope + gradient(part.loss, batch.log_probs)
        start += size
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.allclose(slope, gradient(whole.loss, batch.log_probs), rtol=1e-12, atol=1e-15)
    assert torch.allclose(statistics.sums, whole.statistics.sums, rtol=1e-12, atol=1e-12)


@by_name
def test_weights_stay_within_their_bounds(case):
    batch = random_batch(3, rows=40, tokens=30)
    weights = terms_of(case, batch, context_of(batch)).weights_BT[batch.mask]
    low, high = case.cfg.bounds()
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
    assert metrics["clip_ratio"] > 0.2


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
    cfg = make_weighting("random")
    weights = token_weights(log_probs, cfg, context=context)
    counts = torch.histc(weights, bins=10, min=0.5, max=1.5)
    # 2,000 expected in each of 10 bins; chi-square of 9 degrees of freedom, 99.9 %: 27.9
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 27.9
    flat = weights.flatten()
    neighbours = torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03
    again = token_weights(log_probs, cfg, context=context)
    other = token_weights(log_probs, replace(cfg, seed=1), context=context)
    assert torch.equal(weights, again)
    assert abs(float(torch.corrcoef(torch.stack([flat, other.flatten()]))[0, 1])) < 0.03


# -- Lopti -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.5])
def test_the_two_passes_share_the_tokens(threshold):
    batch = random_batch(0)
    low, rest = (in_pass(batch.old_log_probs, threshold, name) for name in PASSES)
    assert bool((low ^ rest).all())
    assert torch.equal(low, batch.old_log_probs.exp() < threshold)


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean"])
def test_gradients_of_the_two_passes_add_up_to_grpo(mean):
    """At the same parameters; the second pass of a run is made at those after the first."""
    batch = random_batch(0)
    settings = LossSettings(UNIFORM, *EPS, aggregation=mean)
    whole = policy_loss(*batch.tensors, settings)
    parts = []
    for name in PASSES:
        active = in_pass(batch.old_log_probs, 0.5, name)
        terms = policy_loss(*batch.tensors, settings, active=active)
        slope = gradient(terms.loss, batch.log_probs)
        assert torch.equal(slope[~active], torch.zeros_like(slope[~active]))
        assert terms.statistics["tokens"] == (active & batch.mask).sum() > 0
        parts.append((slope, terms.statistics.sums))
    (low, low_sums), (rest, rest_sums) = parts
    assert torch.allclose(low + rest, gradient(whole.loss, batch.log_probs), rtol=1e-12)
    assert torch.allclose(low_sums + rest_sums, whole.statistics.sums, atol=1e-9)


def test_a_pass_of_every_token_is_grpo_bit_for_bit():
    batch = random_batch(0, dtype=torch.float32)
    whole = policy_loss(*batch.tensors, LossSettings(UNIFORM, *EPS))
    for threshold, name in ((0.0, "rest"), (1.5, "low")):
        active = in_pass(batch.old_log_probs, threshold, name)
        terms = policy_loss(*batch.tensors, LossSettings(UNIFORM, *EPS), active=active)
        assert same_bits(terms.loss, whole.loss)
        assert same_bits(
            gradient(terms.loss, batch.log_probs), gradient(whole.loss, batch.log_probs)
        )


def test_lopti_refuses_another_pass():
    with pytest.raises(ValueError, match="pass='high': expected one of low, rest"):
        in_pass(torch.zeros(1, 1), 0.5, "high")


# -- top entropy, matched moments --------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_top_entropy_takes_its_share_of_the_tokens_at_hand(share):
    batch = random_batch(2, rows=30, tokens=40)
    cfg = make_weighting("top_entropy", {"share": share, "allow_constant": True})
    context = replace(context_of(batch), entropy_threshold=None)
    weights = token_weights(batch.log_probs, cfg, batch.mask, context=context)[batch.mask]
    tokens = int(batch.mask.sum())
    assert int(weights.sum()) == max(1, round(share * tokens))
    entropy = context.entropy[batch.mask]
    assert entropy[weights == 1].min() > entropy[weights == 0].max() if share < 1 else True


# -- STARE -------------------------------------------------------------------------------------


def stare_by_hand(cfg, old, advantages, mask):
    """Of each sign the ceil(share * n) rarest tokens, while the mean surprisal is below."""
    tokens = [(i, -old[i], advantages[i]) for i in range(len(old)) if mask[i]]
    weights = [1.0] * len(old)
    if math.fsum(s for _, s, _ in tokens) / len(tokens) >= cfg.target_entropy:
        return weights
    for sign, weight in ((1, cfg.raised), (-1, cfg.lowered)):
        chosen = sorted((s, i) for i, s, a in tokens if a * sign > 0)[::-1]
        for _, i in chosen[: math.ceil(cfg.share * len(chosen))]:
            weights[i] = weight
    return weights


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("target", [0.0, 50.0])
@pytest.mark.parametrize("lowered", [1.0, 0.9])
def test_stare_takes_the_rarest_share_of_each_sign_below_the_target_entropy(share, target, lowered):
    settings = {"share": share, "lowered": lowered, "target_entropy": target}
    cfg = make_weighting("stare", settings)
    for seed in range(3):
        batch = random_batch(seed, rows=6, tokens=9)
        context = TokenContext(old_log_probs=batch.old_log_probs, advantages=batch.advantages)
        found = token_weights(batch.log_probs, cfg, batch.mask, context=context)
        flat = [x.flatten().tolist() for x in (batch.old_log_probs, batch.advantages, batch.mask)]
        expected = torch.tensor(stare_by_hand(cfg, *flat), dtype=found.dtype)
        at = batch.mask.flatten() != 0
        assert torch.equal(found.flatten()[at], expected[at])
        assert bool((expected == 1).all()) is (target == 0)


def test_stare_without_a_token_of_a_sign_chooses_none():
    cfg = make_weighting("stare", {"target_entropy": 9.0, "share": 1.0})
    old = torch.tensor([-1.0, -2.0])
    cuts = cfg.cuts(old, torch.tensor([1.0, 0.0]), torch.tensor([True, True]))
    assert cuts.tolist() == [1.0, math.inf]


def test_stare_takes_a_tenth_of_seventy_tokens():
    """.1 * 70 is above 7 in float64."""
    cfg = make_weighting("stare", {"target_entropy": 99.0, "share": 0.1})
    old = -torch.arange(1.0, 71.0)
    above, _ = cfg.cuts(old, torch.ones(70), torch.ones(70, dtype=torch.bool))
    assert int((-old >= above).sum()) == 7


@pytest.mark.parametrize("name", ["linear", "power"])
@pytest.mark.parametrize("hist", [None, [1, 0, 3, 96], [5.0] * 20])
def test_matched_weights_have_the_mean_and_variance_of_grpo_sg(name, hist):
    cfg = make_weighting(name, {"prob_hist": hist})
    reference = GrpoSG()
    counts = hist or [1]
    points = (torch.arange(60_000, dtype=torch.float64) + 0.5) / 60_000
    share = torch.tensor(counts, dtype=torch.float64).repeat_interleave(60_000 // len(counts))
    moments = []
    for weights in (cfg.curve(points), reference.curve(points)):
        mean = (share * weights).sum() / share.sum()
        variance = (share * (weights - mean) ** 2).sum() / share.sum()
        moments.append([float(mean), float(variance)])
    assert moments[0] == pytest.approx(moments[1], rel=1e-3)
    assert not torch.allclose(cfg.curve(points), reference.curve(points), atol=0.02)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ar", {"placement": "inside"}, "placement='inside': expected one of outside"),
        ("ar", {"alpha": 1.5}, "alpha=1.5: expected a number from 0 to 1"),
        ("ar", {"alpha": 0.0}, "plain GRPO"),
        ("random", {"spread": -0.1}, "spread=-0.1: expected a number"),
        ("random", {"spread": 0.0}, "plain GRPO"),
        ("random", {"seed": 0.5}, "seed=0.5: expected an integer"),
        ("stapo", {"prob": 0.0}, "plain GRPO"),
        ("stapo", {"normalize": "batch_mean"}, "normalize='batch_mean': expected null"),
        ("stare", {"raised": 1.0}, "plain GRPO"),
        ("stare", {"placement": "inside"}, "placement='inside': expected one of outside"),
        ("top_entropy", {"share": 0}, "share=0.0: expected a number above 0, at most 1"),
        ("top_entropy", {"normalize": "batch_mean"}, "normalize='batch_mean': expected null"),
        ("mask_only", {"placement": "inside"}, "placement='inside': expected one of outside"),
        ("linear", {"prob_hist": []}, r"prob_hist=\(\): expected a list of numbers"),
        ("linear", {"prob_hist": [0, 0]}, "expected a bin that is not empty"),
        ("power", {"exponent": 0.1}, "at p = 0, which reverses the update"),
        ("power", {"expnent": 2}, r"expnent=2: expected .* \(did you mean exponent\?\)"),
        ("magic", {}, "type='magic': expected one of uniform, grpo_sg"),
        ("stappo", {}, r"did you mean stapo\?"),
        ("no.module:X", {}, "that can be imported: No module named 'no'"),
        ("math:pi", {}, "expected a subclass of sg_rlhf.algo.weightings.base.Weighting"),
    ],
)
def test_bad_settings_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_weighting(name, settings)
    assert "\n" not in str(caught.value)


READERS = [name for name, cls in WEIGHTINGS.items() if cls.uses]


@pytest.mark.parametrize("name", READERS)
def test_what_a_weighting_reads_must_be_there(name):
    cfg = make_weighting(name)
    with pytest.raises(ValueError, match=f"weighting {name}: expected .*, got None"):
        token_weights(torch.zeros(1, 2), cfg)
    assert not cfg.is_curve and dead_zones(cfg) == (None, None)


def test_the_engines_probability_must_be_there():
    with pytest.raises(ValueError, match="expected engine_log_probs of each token, got None"):
        token_weights(torch.zeros(1, 2), GrpoSG(probability="engine"))


@pytest.mark.parametrize(
    ("name", "cfg", "message"),
    [
        ("ppg", UNIFORM, "type='ppg': expected one of ppo, cispo, aspo"),
        *((n, UNIFORM, f"placement='inside': expected 'outside' with {n}") for n in OBJECTIVES
          if n != "ppo"),
    ],
)  # fmt: skip
def test_bad_objectives_are_refused(name, cfg, message):
    with pytest.raises(ParameterError, match=message):
        policy_loss(*random_batch(0).tensors, LossSettings(cfg, *EPS, objective=name))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sapo", {"tau_positive": 0}, "tau_positive=0.0: expected a finite number above 0"),
        ("dppo_tv", {"delta_high": 1.1}, "delta_high=1.1: expected a number from 0 to 1"),
        ("aspo", {"kap": 3}, r"kap=3: expected one of the keys cap \(did you mean cap\?\)"),
        ("cispo", {"cap": 3}, "cap=3: expected no parameters"),
    ],
)
def test_bad_parameters_of_an_objective_are_refused(name, settings, message):
    with pytest.raises(ParameterError, match=message):
        make_objective(name, settings)


def test_normalised_random_weights_have_mean_one_over_shards():
    batch = random_batch(0)
    context = context_of(batch)
    cfg = make_weighting("random", {"normalize": "batch_mean"})
    total, count = weight_sum_and_count(batch.log_probs, cfg, batch.mask, context=context)
    context = replace(context, mean_weight=total / count)
    weights = token_weights(batch.log_probs, cfg, batch.mask, context=context)
    assert weights[batch.mask].mean().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("positive", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(
    ("ratio", "advantage", "kept"),
    [
        (1.23, 1.0, True), (1.25, 1.0, False), (2.01, 1.0, False), (12.5, 1.0, False),
        (0.3, 1.0, True), (0.81, -1.0, True), (0.79, -1.0, False), (2.01, -1.0, True),
    ],
)  # fmt: skip
def test_negative_only_leaves_ppos_clip_where_it_is(positive, ratio, advantage, kept):
    """W-REINFORCE (positive = 0.1) scales a token's loss; PPO's clip is on the ratio."""
    log_probs = torch.tensor([[math.log(0.05 * ratio)]], dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([[math.log(0.05)]]).double(), torch.tensor([[advantage]]).double()
    cfg = make_weighting("negative_only", {"positive": positive})
    terms = policy_loss(log_probs, old, a, torch.ones(1, 1), LossSettings(cfg, *EPS))
    weight = positive if advantage > 0 else 1.0
    expected = -weight * ratio * advantage if kept else 0.0
    assert gradient(terms.loss, log_probs).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["negative_only", "positive_only"])
def test_one_sign_only_inside_the_clip_is_refused(name):
    with pytest.raises(ParameterError, match="placement"):
        make_weighting(name, {"placement": "inside"})


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("old_p", "p", "kept"),
    [(0.2, 0.49, True), (0.2, 0.51, False), (0.6, 0.31, True), (0.6, 0.29, False)],
)
def test_ipo_masks_by_distance_in_both_directions(old_p, p, kept, advantage):
    """DPPO keeps a token whose update would bring its probability back; IPO does not."""
    log_probs = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([[math.log(old_p)]]).double(), torch.tensor([[advantage]]).double()
    cfg = make_weighting("uniform", {"placement": "outside"})
    terms = policy_loss(
        log_probs, old, a, torch.ones(1, 1), LossSettings(cfg, *EPS, objective="ipo")
    )
    expected = -p / old_p * advantage if kept else 0.0
    assert gradient(terms.loss, log_probs).item() == pytest.approx(expected)
