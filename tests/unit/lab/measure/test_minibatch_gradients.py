"""`python -m lab.measure.minibatch_gradients`: exact cases, its files, its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.measure import minibatch_gradients
from lab.measure.adamw import AdamW
from lab.measure.batch_loss import UNIFORM, Surrogate
from lab.measure.checkpoint import MeasureError, load_model, responses
from lab.measure.fixed_batch import BatchRow, FixedBatch
from lab.measure.minibatch_figures import Vector, summarise
from lab.measure.minibatch_gradients import compare, gradients, optimizer_of, warm_up
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.config import ConfigError, load_config

ALGORITHMS = Path(__file__).parents[4] / "configs" / "algorithms"
MODEL = "module:sg_rlhf.tiny.kk_tiny"
REWARD = "domain:kk"


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, torch.float64, torch.device("cpu"))


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(3)
    rows = [
        BatchRow((7, 8), tuple(torch.randint(5, 500, (n,), generator=generator).tolist()), a)
        for n, a in ((6, 1.2), (3, -0.4), (8, -0.8))
    ]
    return FixedBatch(tuple(rows), 1.0, "", "a test")


def gradient(model, batch, surrogate, pass_tokens=8192):
    return gradients(model, batch, {"it": surrogate}, pass_tokens)["it"]


def constant(value, placement):
    # L = U: a weight that is the same for every token, that is a step size.
    return GrpoSG(lower=value, upper=value, placement=placement, allow_constant=True)


def test_a_constant_weight_changes_the_size_and_nothing_else(model, batch):
    losses = {
        "grpo": Surrogate(UNIFORM),
        "inside": Surrogate(constant(1.1, "inside")),
        "outside": Surrogate(constant(1.7, "outside")),
    }
    found = compare(model, batch, losses, 8192)
    [(norm, cosine)] = found["grpo"]
    assert norm > 0 and cosine == pytest.approx(1)
    for name, factor in (("inside", 1.1), ("outside", 1.7)):
        assert found[name] == [pytest.approx((factor * norm, 1), rel=1e-5)]


def other_batches(batch):
    """Minibatches of the same rows with other advantages; the second has no gradient."""
    for advantages in ((-0.3, 1.1, -0.8), (0.0, 0.0, 0.0), (0.9, -1.2, 0.3)):
        rows = zip(batch.rows, advantages, strict=True)
        yield replace(batch, rows=tuple(replace(row, advantage=a) for row, a in rows))


@pytest.mark.parametrize("eps", [1e-12, 1e-4])
def test_a_constant_weight_does_not_change_the_step_unless_eps_or_the_clip_acts(model, batch, eps):
    losses = {
        "grpo": Surrogate(UNIFORM),
        "outside": Surrogate(constant(1.7, "outside")),
    }
    norms = {name: v[0].norm for name, v in compare(model, batch, losses, 8192).items()}
    for max_norm, cancels in ((None, True), (1.3 * norms["grpo"], False)):
        moments = warm_up(
            model, other_batches(batch), losses, 8192, AdamW(eps=eps, max_norm=max_norm)
        )
        assert moments["grpo"].steps == 2
        found = compare(model, batch, losses, 8192, moments)
        (gradient_size, _), (step, cosine) = found["outside"]
        assert gradient_size == pytest.approx(1.7 * norms["grpo"], rel=1e-5)
        same = step == pytest.approx(found["grpo"][1].norm, rel=1e-3)
        assert same is (cancels and eps < 1e-6)
        assert not same or cosine == pytest.approx(1, abs=1e-5)


def test_the_step_is_that_of_torchs_optimizer(model, batch):
    losses = {"sg": Surrogate(GrpoSG())}
    optimizer = AdamW(max_norm=0.05)
    moments = warm_up(model, other_batches(batch), losses, 8192, optimizer)
    [_, (found, _)] = compare(model, batch, losses, 8192, moments)["sg"]
    param = torch.nn.Parameter(torch.zeros(sum(p.numel() for p in model.parameters())).double())
    theirs = torch.optim.AdamW([param], lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    before = param.detach().clone()
    for part in (*other_batches(batch), batch):
        if not any(row.advantage for row in part.rows):
            continue
        before = param.detach().clone()
        param.grad = gradient(model, part, losses["sg"]).double()
        torch.nn.utils.clip_grad_norm_([param], 0.05)
        theirs.step()
    assert found == pytest.approx(float((param.detach() - before).norm()), rel=1e-6)


def test_the_optimizer_is_the_recipes():
    assert optimizer_of(load_config(None, [])) == AdamW((0.9, 0.999), 1e-8, 1.0)
    recipe = ALGORITHMS.parent / "kk" / "grpo_tiny_cpu.yaml"
    config = load_config([str(recipe)], ["actor.adam.betas=[0.8,0.9]", "actor.max_norm=0.2"])
    assert optimizer_of(config) == AdamW((0.8, 0.9), 1e-8, 0.2)
    assert optimizer_of(load_config(None, ["actor.adam.eps=0.1"])).eps == 0.1
    with pytest.raises(MeasureError, match=r"actor.optim=muon: expected adam .* --warm-up 0"):
        optimizer_of(load_config(None, ["actor.optim=muon"]))
    with pytest.raises(ConfigError, match=r"actor.adam.betas=\[0.9, 1.0\]: expected"):
        optimizer_of(load_config(None, ["actor.adam.betas=[0.9,1.0]"]))


def test_losses_that_share_a_forward_pass_do_not_see_each_other(model, batch):
    """Nor does a gradient depend on how the minibatch is cut into passes."""
    losses = {
        name: Surrogate(GrpoSG(upper=upper, placement=placement, normalize=normalize))
        for name, upper, placement, normalize in (
            ("inside", 1.2, "inside", None),
            ("outside", 1.4, "outside", None),
            ("normalized", 1.4, "outside", "batch_mean"),
        )
    }
    together = gradients(model, batch, losses, 8192)
    for name, surrogate in losses.items():
        torch.testing.assert_close(together[name], gradient(model, batch, surrogate))
    in_pieces = gradients(model, batch, losses, 1)
    torch.testing.assert_close(in_pieces, together, rtol=1e-4, atol=1e-7)


def test_a_weight_beyond_the_clip_leaves_the_negative_tokens_alone(model, batch):
    """1.4 inside the clip of 0.24: what is left is the gradient of the responses with A < 0."""
    rows = tuple(row for row in batch.rows if row.advantage < 0)
    weighted = gradient(model, batch, Surrogate(constant(1.4, "inside")))
    total, kept = batch.tokens, sum(len(row.response) for row in rows)
    negative = FixedBatch(rows, 1.0, "", "a test")
    expected = gradient(model, negative, Surrogate(UNIFORM)) * 1.4 * kept / total
    torch.testing.assert_close(weighted, expected, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_the_trainers_losses(model, batch):
    cfg = GrpoSG(upper=1.2)
    found = gradient(model, batch, Surrogate(cfg))
    model.zero_grad()
    passed = responses(model, batch.rows)
    log_probs, mask = passed.log_probs_BT(), passed.mask_BT
    advantages = torch.tensor([[row.advantage] for row in batch.rows]).expand_as(log_probs)
    old = log_probs.detach()
    loss = policy_loss(log_probs, old, advantages, mask, LossSettings(cfg, 0.2, 0.24, 10.0)).loss
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_spread_does_not_see_a_scale_and_its_interval_holds_what_is_true():
    generator = np.random.default_rng(0)
    base = np.exp(0.3 * generator.standard_normal(60))
    calmer = base.mean() + 0.5 * (base - base.mean())

    def measured(norms, cosine, steps):
        return [[Vector(norm, cosine) for norm in part] for part in (norms, steps)]

    found = {
        "grpo": measured(base, 1.0, calmer),
        "scaled": measured(1.4 * base, 1.0, calmer),
        "calmer": measured(calmer, 0.9, 2 * base),
    }
    rows = summarise(found, AdamW(max_norm=float(base.max())))
    assert [row["clipped"] for row in rows] == [0, float((1.4 * base > base.max()).mean()), 0]
    assert rows[1]["update"]["size_range"] == [1, 1] and "clipped" not in rows[1]["update"]
    assert rows[2]["update"]["spread_over_baseline"] == pytest.approx(2)
    assert "spread_over_baseline" not in rows[0]
    assert rows[1]["size"] == pytest.approx(1.4)
    assert rows[1]["spread_over_baseline_ci95"] == pytest.approx([1, 1])
    assert rows[1]["peak"] == pytest.approx(rows[0]["peak"])
    assert rows[2]["spread_over_baseline"] == pytest.approx(0.5)
    low, high = rows[2]["spread_over_baseline_ci95"]
    assert low <= 0.5 <= high < 0.6
    assert rows[2]["cosine"] == pytest.approx(0.9)


@pytest.mark.full
def test_the_command_and_its_files(puzzles, tmp_path, capsys):
    out = tmp_path / "o.json"
    arguments = [
        "--model", MODEL, "--data", str(puzzles), "--reward", REWARD, "--batches", "2",
        "--prompts", "3", "--group", "6", "--max-new-tokens", "48", "--warm-up", "2",
        "--algorithm", *(
            str(ALGORITHMS / f"{name}.yaml")
            for name in ("grpo", "grpo_sg_quotient", "grpo_sg", "random", "ar", "stapo")
        ),
        "--json", str(out),
    ]  # fmt: skip
    assert minibatch_gradients.main(arguments) == 0
    text = capsys.readouterr().out
    found = json.loads(out.read_text())
    (report,) = found["models"]
    quotient, product, random, ar, stapo = report["algorithms"][1:]
    # The printed form with its published constants is GRPO.
    assert quotient["size_range"] == pytest.approx([1, 1])
    assert quotient["cosine_min"] == pytest.approx(1)
    assert quotient["update"]["cosine_min"] == pytest.approx(1)
    assert 0 < product["cosine"] < 0.999
    assert 0 < random["cosine"] < 0.999 and 0.7 < ar["size"] <= 1 and 0.5 < stapo["size"] < 1.1
    assert report["optimizer"] == {
        "warm_up": 2, "betas": [0.9, 0.999], "eps": 1e-8, "max_norm": 1.0
    }  # fmt: skip
    assert found["command"].startswith("python -m lab.measure.minibatch_gradients --model")
    assert found["machine"]["cores"] >= 1
    assert "AdamW's step over the learning rate after 2 other" in text
    assert len(report["update_norms"]["grpo_sg"]) == 2
    # The gradients do not depend on the warm-up.
    alone = [*arguments[: arguments.index("--json")], "--warm-up", "0", "--json", str(out)]
    assert minibatch_gradients.main(alone) == 0
    (without,) = json.loads(out.read_text())["models"]
    assert without["norms"] == report["norms"] and without["optimizer"] is None
    assert "update" not in without["algorithms"][0] and "update:" not in capsys.readouterr().out
    assert "2 minibatches of 3 prompts x 6" in text and "grpo_sg_quotient" in text
    assert len(report["norms"]["grpo_sg"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--algorithm": [ALGORITHMS / "lopti.yaml"]}, "lopti.yaml: sg.update=lopti: expected"),
        ({"--warm-up": ["-1"]}, "--warm-up: -1: expected a whole number"),
        ({"--algorithm": [ALGORITHMS / "cispo.yaml"]}, "cispo.yaml: "),
        ({"--algorithm": ["no.yaml"]}, "no.yaml"),
        ({"--algorithm": [ALGORITHMS / "grpo.yaml"] * 2}, "a second grpo"),
        ({"--batches": ["9"]}, "6 prompts; expected 72 for --batches 9 of --prompts 8"),
        ({"--batch": ["b.json"]}, "--batch"),
        ({"--reward": ["none.py"]}, "--reward none.py: no such Python file"),
        ({"--data": ["none.jsonl"]}, "--data none.jsonl: no such file"),
    ],
)
def test_bad_requests_are_one_line(puzzles, refused, changes, message):
    given = {
        "--model": [MODEL], "--data": [puzzles], "--reward": [REWARD], "--batches": ["1"],
        "--prompts": ["8"], "--algorithm": [ALGORITHMS / "grpo.yaml"], **changes,
    }  # fmt: skip
    if "--reward" in changes:
        given["--prompts"] = ["2"]
    arguments = [part for name, values in given.items() for part in (name, *values)]
    assert message in refused(minibatch_gradients.main, *arguments)
