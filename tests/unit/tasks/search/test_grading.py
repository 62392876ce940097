"""Grades and rewards of answers to questions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.tasks.search.grading import (
    SCHEMES,
    normalise,
    occurs_in,
    parse_golds,
    score,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles", "beatles"),
        ("U.S.A.", "usa"),
        ("  an\tApple a Day ", "apple day"),
        ("Theatre and Ananas", "theatre and ananas"),
        ("rock-n-roll", "rocknroll"),
        ("“curly” quotes — stay", "“curly” quotes — stay"),
        ("1,000", "1000"),
        ("The", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "correct"),
    [
        ("beijing.", ["Beijing"], True),
        ("the Beijing", ["Peking", "Beijing"], True),
        ("Beijing, China", ["Beijing"], False),
        ("", ["Beijing"], False),
        # Golds that normalise to nothing compare as they are.
        ("", ["A"], False),
        ("the", ["A"], False),
        ("a", ["A"], True),
        ("the the", ["The The"], True),
        ("...", ["!"], False),
    ],
)
def test_exact_match(answer: str, golds: list[str], correct: bool) -> None:
    assert score(answer, golds).correct is correct


def test_rewards_of_each_scheme() -> None:
    golds = ["New York City"]
    right, near, none = "new york city", "York City Hall", None
    assert [score(a, golds, "sign").reward for a in (right, near, none)] == [1.0, -1.0, -1.0]
    assert [score(a, golds, "binary").reward for a in (right, near, none)] == [1.0, 0.0, 0.0]
    assert [score(a, golds, "f1").reward for a in (right, near, none)] == [
        1.0,
        pytest.approx(2 / 3),
        0.0,
    ]
    found = score(near, golds, "f1")
    assert (found.correct, found.reason, found.format_ok) == (False, "wrong", True)
    assert found.logs == {"f1": pytest.approx(2 / 3)} == score(near, golds, "sign").logs
    assert (score(none, golds).reason, score("", golds).format_ok) == ("no_answer", False)


def test_f1_counts_a_repeated_word_once_for_each_time() -> None:
    assert token_f1("york york", "new york") == pytest.approx(0.5)
    assert token_f1("boston", "new york") == 0.0


def test_bad_schemes_and_no_golds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of sign, binary, f1"):
        score("x", ["x"], "plus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no reference answer"):
        score("x", [])


@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=4), st.sampled_from(SCHEMES))
def test_scores_agree_with_each_other(answer: str, golds: list[str], scheme: str) -> None:
    result = score(answer, golds, scheme)  # type: ignore[arg-type]
    assert 0.0 <= result.logs["f1"] <= 1.0
    assert (result.reward == 1.0) >= result.correct
    assert not result.correct or result.logs["f1"] == 1.0
    for gold in golds:
        assert score(gold, golds).correct


def test_occurs_in_looks_for_whole_words() -> None:
    assert occurs_in("Brem Ford", "She is a weaver from Brem Ford.")
    assert not occurs_in("rem For", "from Brem Ford")
    assert not occurs_in("the", "the the")
    assert not occurs_in("", "anything")


@pytest.mark.parametrize(
    "label", ["", "Beijing", "[]", '[""]', "[1]", '{"a": 1}', "null", '["a", " "]']
)
def test_labels_that_are_no_list_of_golds(label: str) -> None:
    with pytest.raises(ValueError, match="expected a JSON array of strings"):
        parse_golds(label)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
def test_labels_give_the_golds_back(golds: list[str]) -> None:
    assert parse_golds(json.dumps(golds)) == tuple(golds)
