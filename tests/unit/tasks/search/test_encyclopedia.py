"""The generated encyclopedia: answerable, deterministic, its held-out part apart; its traces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.search.grading import normalise
from sg_rlhf.tasks.search.protocol import Kind, parse_action
from sg_rlhf.tasks.search.sets import encyclopedia, traces

seeds = st.integers(0, 10**6)


def entries(problems: list[encyclopedia.Problem]) -> set[str]:
    return {step.query for problem in problems for step in problem.steps}


@settings(max_examples=20)
@given(seeds, st.integers(4, 60), st.integers(4, 30))
def test_held_out_questions_share_no_entry_with_those_to_train_on(
    seed: int, people: int, towns: int
) -> None:
    made = encyclopedia.build(seed, people=people, towns=towns)
    assert made == encyclopedia.build(seed, people=people, towns=towns)
    assert not entries(made.train) & entries(made.test)
    texts = [p.question.text for p in (*made.train, *made.test)]
    assert len(set(texts)) == len(texts) == 4 * people + 2 * towns
    assert len(made.corpus) == people + towns


def test_every_question_is_answered_by_its_passages_and_by_no_other() -> None:
    made = encyclopedia.build(0)
    by_title = {}
    for record in made.corpus:
        title, _, text = record["contents"].partition("\n")
        assert title not in by_title
        by_title[title] = text
    for problem in (*made.train, *made.test):
        for step in problem.steps:
            assert by_title[step.title] == step.text
            assert step.query in step.text
        *earlier, last = problem.steps
        assert problem.answer in last.text and problem.answer in problem.guesses
        # Two hops are needed: the first passage names the second, and holds no answer.
        assert all(problem.answer not in step.text for step in earlier)
        assert all(
            a.text.endswith(f"{b.query}.") for a, b in zip(earlier, problem.steps[1:], strict=True)
        )
        assert problem.steps[0].query in problem.question.text
    hops = [len(p.steps) for p in made.train]
    assert set(hops) == {1, 2}


def test_another_seed_is_another_encyclopedia() -> None:
    assert encyclopedia.build(0).corpus != encyclopedia.build(1).corpus


@pytest.mark.parametrize("argument", [{"people": 3}, {"towns": 97}, {"test_share": 1.0}])
def test_arguments_out_of_range_are_named(argument: dict[str, float]) -> None:
    name, value = next(iter(argument.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        encyclopedia.build(0, **argument)  # type: ignore[arg-type]


def test_words_of_the_closed_lists_are_distinct_and_survive_normalisation() -> None:
    lists = (
        encyclopedia.FIRST_NAMES, encyclopedia.LAST_NAMES, encyclopedia.TOWN_STARTS,
        encyclopedia.TOWN_ENDS, encyclopedia.LANDS, encyclopedia.RIVERS, encyclopedia.CRAFTS,
    )  # fmt: skip
    words = [word for words in lists for word in words]
    assert len(set(words)) == len(words)
    assert len({normalise(word) for word in words}) == len(words)


@given(seeds)
@settings(max_examples=20)
def test_traces_are_dialogues_of_the_protocol(seed: int) -> None:
    made = encyclopedia.build(seed % 5, people=20, towns=8)
    rng = random.Random(seed)
    for problem in made.train:
        right = traces.demonstrate(problem)
        ours = [parse_action(piece.text) for piece in right.pieces if piece.of_model]
        assert [a.kind for a in ours] == [Kind.SEARCH] * len(problem.steps) + [Kind.ANSWER]
        assert [a.content for a in ours] == [s.query for s in problem.steps] + [problem.answer]
        assert [p.of_model for p in right.pieces[1::2]] == [False] * len(problem.steps)
        guess = traces.demonstrate(problem, 0, rng.choice(problem.guesses))
        assert [p.of_model for p in guess.pieces] == [True]
        assert parse_action(guess.response).content in problem.guesses
        hasty = traces.demonstrate(problem, 1, rng.choice(problem.guesses))
        assert sum(not p.of_model for p in hasty.pieces) == 1
    drawn = [traces.draw(made.train, rng, guesses=0.5, hasty=0.25) for _ in range(400)]
    guessed = sum(len(d.pieces) == 1 for d in drawn) / 400
    assert 0.4 < guessed < 0.6
    assert all(d.prompt.startswith("Question: ") and d.prompt.endswith("?\n") for d in drawn)
