"""The warm start: its data, its packing, and that a short build is reproducible and learns."""

import itertools

import pytest
import torch

from sg_rlhf.tasks.kk.data import generate_splits
from sg_rlhf.tasks.kk.tiny import TINY, WarmStart, held_out_puzzles
from sg_rlhf.tiny.build import new_model
from sg_rlhf.tiny.tokenizer import build_tokenizer
from sg_rlhf.tiny.warm_start import (
    Demonstration,
    batches,
    demonstrations,
    learning_rate_factor,
    train,
)

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


def test_a_short_build_is_deterministic_and_lowers_the_loss():
    weights, losses = [], []
    for _ in range(2):
        model = new_model(TOKENIZER, seed=3)
        losses.append(train(model, TOKENIZER, SHORT, seed=3))
        weights.append(model.state_dict())
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert losses[0][-1] < losses[0][0] - 1.0
