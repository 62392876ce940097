"""How the tiny models are made: the warm start and its optimizer."""

from __future__ import annotations

import itertools

import pytest
import torch

from sg_rlhf.tasks.kk.data import generate_splits
from sg_rlhf.tasks.kk.tiny import TINY, WarmStart, held_out_puzzles
from sg_rlhf.tiny.build import new_model
from sg_rlhf.tiny.muon import Muon, orthogonalise
from sg_rlhf.tiny.tokenizer import build_tokenizer
from sg_rlhf.tiny.warm_start import (
    Demonstration,
    batches,
    demonstrations,
    learning_rate_factor,
    train,
)

# -- The warm start: its data, its packing, and that a short build is reproducible and learns ----


TOKENIZER = build_tokenizer(TINY)
SHORT = WarmStart(steps=5, rows=2)


def take(n: int, recipe: WarmStart = SHORT, seed: int = 0) -> list[Demonstration]:
    return list(itertools.islice(demonstrations(recipe, TOKENIZER, seed), n))


def test_demonstrations_depend_on_the_seed_alone():
    assert take(20) == take(20)
    assert take(20) != take(20, seed=1)


def test_shares_of_the_mixture():
    demos = take(2000)
    guess = TOKENIZER("Guess")["input_ids"][0]
    share = sum(demo.response[0] == guess for demo in demos) / len(demos)
    assert share == pytest.approx(SHORT.guess_share, abs=0.04)
    assert all(demo.response[-1] == TOKENIZER.eos_token_id for demo in demos)


def test_held_out_puzzles_are_the_data_commands_test_split():
    _, test = generate_splits((2, 3), per_size=0, test_per_size=100, seed=0)
    held_out = {puzzle.structure for puzzle in held_out_puzzles()}
    assert {puzzle.structure for puzzle in test} <= held_out


def test_no_demonstration_is_held_out():
    quizzes = {p.quiz for p in held_out_puzzles()}
    assert not any(quiz in TOKENIZER.decode(demo.prompt) for demo in take(300) for quiz in quizzes)


def test_batches_pack_every_demonstration_once():
    demos = take(200)
    packed = list(batches(iter(demos), SHORT, TOKENIZER.pad_token_id))
    learnt = sum((batch.labels != -100).sum().item() for batch in packed)
    sent = list(itertools.accumulate(len(demo.response) for demo in demos))
    # The last, unfinished batch is not sent.
    assert learnt in sent
    assert learnt > 0.8 * sent[-1]
    for batch in packed:
        assert batch.inputs.shape == (SHORT.rows, SHORT.row_tokens)
        kept = batch.labels != -100
        assert torch.equal(batch.inputs[kept], batch.labels[kept])


def test_packed_neighbours_do_not_see_each_other():
    model = new_model(TOKENIZER, seed=0).eval()
    demos = take(6)
    batch = next(batches(iter(demos * 9), SHORT, TOKENIZER.pad_token_id))
    with torch.no_grad():
        packed = model(input_ids=batch.inputs, position_ids=batch.positions, use_cache=False).logits
        starts = (batch.positions[0] == 0).nonzero()[:, 0].tolist()
        assert len(starts) > 1
        for begin, end in itertools.pairwise(starts):
            alone = model(input_ids=batch.inputs[:1, begin:end]).logits
            torch.testing.assert_close(packed[:1, begin:end], alone, atol=1e-4, rtol=1e-4)


def test_learning_rate_is_flat_then_linear():
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[:51] == [1.0] * 51
    assert factors[75] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.02)


@pytest.mark.full
def test_a_short_build_is_deterministic_and_lowers_the_loss():
    weights, losses = [], []
    for _ in range(2):
        model = new_model(TOKENIZER, seed=3)
        losses.append(train(model, TOKENIZER, SHORT, seed=3))
        weights.append(model.state_dict())
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert losses[0][-1] < losses[0][0] - 1.0


# -- Muon: orthogonalised steps, and the same update as torch's bf16 implementation --------------


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_singular_values_become_nearly_one(shape):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(0.1, 1.0, min(shape))
    before = (u * values) @ v
    after = orthogonalise(before)
    singular = torch.linalg.svdvals(after)
    # The iteration trades accuracy for speed: its fixed band is about 0.7 to 1.2.
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    # The directions stay: u^T after v is diagonal.
    inner = u.T @ after @ v.T
    torch.testing.assert_close(inner, inner.diag().diag(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_same_update_as_torch(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    optimizers = [Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)]
    for _ in range(3):
        grad = torch.randn(shape)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - start).norm()
    # bf16 has 8 bits: the two differ by about 1 % of the way.
    assert (ours - theirs).norm() < 0.03 * moved


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="Muon updates matrices"):
        Muon([torch.zeros(3, requires_grad=True)])
