"""`python -m sg_rlhf.measure.minibatch_gradients`: exact cases, its files, its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sg_rlhf.algo.policy_loss import policy_loss_terms
from sg_rlhf.algo.shaping import TokenWeightConfig
from sg_rlhf.measure import minibatch_gradients
from sg_rlhf.measure.batch_loss import UNIFORM, BatchLoss, Surrogate
from sg_rlhf.measure.checkpoint import load_model, responses
from sg_rlhf.measure.fixed_batch import BatchRow, FixedBatch
from sg_rlhf.measure.minibatch_gradients import Measured, compare, gradient, summarise

ALGORITHMS = Path(__file__).parents[3] / "configs" / "algorithms"
MODEL = "module:sg_rlhf.tiny.kk_tiny"
REWARD = "module:sg_rlhf.tasks.kk.reward"


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


def constant(value, placement):
    # L = U: a weight that is the same for every token, that is a step size.
    return TokenWeightConfig(
        lower=value, upper=value, placement=placement, allow_constant=True, shaping="grpo_sg"
    )


def test_a_constant_weight_changes_the_size_and_nothing_else(model, batch):
    losses = {
        "grpo": Surrogate(UNIFORM),
        "inside": Surrogate(constant(1.1, "inside")),
        "outside": Surrogate(constant(1.7, "outside")),
    }
    found = compare(model, batch, losses, 8192)
    norm = found["grpo"][0]
    assert norm > 0 and found["grpo"][1] == pytest.approx(1)
    for name, factor in (("inside", 1.1), ("outside", 1.7)):
        assert found[name] == pytest.approx((factor * norm, 1), rel=1e-5)


def test_a_weight_beyond_the_clip_leaves_the_negative_tokens_alone(model, batch):
    """1.4 inside the clip of 0.24: what is left is the gradient of the responses with A < 0."""
    rows = tuple(row for row in batch.rows if row.advantage < 0)
    weighted = gradient(model, BatchLoss(model, batch, Surrogate(constant(1.4, "inside"))))
    total, kept = batch.tokens, sum(len(row.response) for row in rows)
    negative = FixedBatch(rows, 1.0, "", "a test")
    expected = gradient(model, BatchLoss(model, negative, Surrogate(UNIFORM))) * 1.4 * kept / total
    torch.testing.assert_close(weighted, expected, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_the_trainers_losses(model, batch):
    cfg = TokenWeightConfig(upper=1.2)
    found = gradient(model, BatchLoss(model, batch, Surrogate(cfg)))
    model.zero_grad()
    passed = responses(model, batch.rows)
    log_probs, mask = passed.log_probs_BT(), passed.mask_BT
    advantages = torch.tensor([[row.advantage] for row in batch.rows]).expand_as(log_probs)
    old = log_probs.detach()
    loss = policy_loss_terms(log_probs, old, advantages, mask, cfg, 0.2, 0.24, 10.0).loss
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_spread_does_not_see_a_scale_and_its_interval_holds_what_is_true():
    generator = np.random.default_rng(0)
    base = np.exp(0.3 * generator.standard_normal(60))
    calmer = base.mean() + 0.5 * (base - base.mean())
    rows = summarise(
        [
            Measured("grpo", "", base.tolist(), [1.0] * 60),
            Measured("scaled", "", (1.4 * base).tolist(), [1.0] * 60),
            Measured("calmer", "", calmer.tolist(), [0.9] * 60),
        ]
    )
    assert "spread_over_baseline" not in rows[0]
    assert rows[1]["size"] == pytest.approx(1.4)
    assert rows[1]["spread_over_baseline_ci95"] == pytest.approx([1, 1])
    assert rows[1]["peak"] == pytest.approx(rows[0]["peak"])
    assert rows[2]["spread_over_baseline"] == pytest.approx(0.5)
    low, high = rows[2]["spread_over_baseline_ci95"]
    assert low <= 0.5 <= high < 0.6
    assert rows[2]["cosine"] == pytest.approx(0.9)


def test_the_command_and_its_files(puzzles, tmp_path, capsys):
    out, picture = tmp_path / "o.json", tmp_path / "o.png"
    arguments = [
        "--model", MODEL, "--data", str(puzzles), "--reward", REWARD, "--batches", "2",
        "--prompts", "3", "--group", "6", "--max-new-tokens", "48", "--algorithm",
        *(str(ALGORITHMS / f"{name}.yaml") for name in ("grpo", "grpo_sg_quotient", "grpo_sg")),
        "--json", str(out), "--plot", str(picture),
    ]  # fmt: skip
    assert minibatch_gradients.main(arguments) == 0
    text = capsys.readouterr().out
    report = json.loads(out.read_text())
    quotient, product = report["algorithms"][1:]
    # The printed form with its published constants is GRPO.
    assert quotient["size_range"] == pytest.approx([1, 1])
    assert quotient["cosine_min"] == pytest.approx(1)
    assert 0 < product["cosine"] < 0.999
    assert "2 minibatches of 3 prompts x 6" in text and "grpo_sg_quotient" in text
    assert len(report["norms"]["grpo_sg"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--algorithm": [ALGORITHMS / "random.yaml"]},
            "random.yaml: sg.weighting.type=random: expected",
        ),
        ({"--algorithm": [ALGORITHMS / "cispo.yaml"]}, "cispo.yaml: "),
        ({"--algorithm": ["no.yaml"]}, "no.yaml"),
        ({"--algorithm": [ALGORITHMS / "grpo.yaml"] * 2}, "a second grpo"),
        ({"--batches": ["9"]}, "6 prompts; expected 72 for --batches 9 of --prompts 8"),
        ({"--batch": ["b.json"]}, "--batch: not taken here"),
        ({"--reward": ["none.py"]}, "--reward none.py: no such Python file"),
        ({"--data": ["none.jsonl"]}, "--data none.jsonl: no such file"),
    ],
)
def test_bad_requests_are_one_line(puzzles, capsys, changes, message):
    given = {
        "--model": [MODEL], "--data": [puzzles], "--reward": [REWARD], "--batches": ["1"],
        "--prompts": ["8"], "--algorithm": [ALGORITHMS / "grpo.yaml"], **changes,
    }  # fmt: skip
    if "--reward" in changes:
        given["--prompts"] = ["2"]
    arguments = [str(part) for name, values in given.items() for part in (name, *values)]
    try:
        status = minibatch_gradients.main(arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1
