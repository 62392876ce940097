"""Statements: reading them, their truth, and the solver against brute force."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.logic import PuzzleError, canonical, evaluate, parse_statements, solve
from tests.unit.tasks.kk.oracles import as_python, brute_force, puzzle_statements, statements_of

T0, T1, L0, L1 = ("telling-truth", 0), ("telling-truth", 1), ("lying", 0), ("lying", 1)


@settings(max_examples=150, deadline=None)
@given(puzzle_statements(4))
def test_solve_finds_what_brute_force_finds(statements):
    assert solve(statements) == brute_force(statements)


@settings(max_examples=200, deadline=None)
@given(statements_of(4), st.tuples(*[st.booleans()] * 4))
def test_evaluate_is_the_python_expression(statement, assignment):
    assert evaluate(statement, assignment) is bool(eval(as_python(statement), {"k": assignment}))


@pytest.mark.parametrize(
    ("statement", "truth_table"),
    [  # over (0, 1) = TT, TF, FT, FF
        (("and", T0, T1), "TFFF"),
        (("or", T0, T1), "TTTF"),
        (("->", T0, T1), "TFTT"),
        (("<=>", T0, T1), "TFFT"),
        (("not", T0), "FFTT"),
        (L1, "FTFT"),
    ],
)
def test_connectives_by_hand(statement, truth_table):
    rows = itertools.product((True, False), repeat=2)
    assert "".join("FT"[evaluate(statement, row)] for row in rows) == truth_table


def test_known_puzzles():
    assert solve((L1, ("and", T0, T1))) == [(True, False)]
    assert solve((L0, T0)) == []  # "I am a knave"
    assert solve((T1, T0)) == [(True, True), (False, False)]


def test_twelve_people_are_quick():
    chain = tuple(("telling-truth", (i + 1) % 12) for i in range(12))
    assert solve(chain) == [(True,) * 12, (False,) * 12]


@settings(max_examples=40, deadline=None)
@given(puzzle_statements())
def test_every_stored_form_is_read_back(statements):
    as_lists = json.loads(json.dumps(statements))
    as_arrays = np.empty(len(statements), dtype=object)
    as_arrays[:] = as_lists
    for stored in (repr(statements), statements, as_lists, repr(as_lists), as_arrays):
        assert parse_statements(stored) == statements


def test_numpy_integers_become_plain_ones():
    (statement, _) = parse_statements([["lying", np.int64(1)], ["lying", np.int64(0)]])
    assert statement == L1
    assert type(statement[1]) is int


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a Python literal"),
        ("(('lying', 1)", "not a Python literal"),
        ("__import__('os')", "not a Python literal"),
        ("(" * 10_000, "not a Python literal"),
        ("()", "one statement per person"),
        ("7", "one statement per person"),
        (None, "one statement per person"),
        ("(('lying', 1),)", "person 0: 'lying' needs one person, 0 to 0"),
        ("(('lying', -1), ('lying', 0))", "needs one person"),
        ("(('lying', True), ('lying', 0))", "needs one person"),
        ("(('lying', 1.0), ('lying', 0))", "needs one person"),
        ("(('lying', 1), ('lying', 0, 1))", "person 1: 'lying' needs one person"),
        ("(('xor', ('lying', 0), ('lying', 0)),)", "unknown connective 'xor'"),
        ("(('not', ('lying', 0), ('lying', 0)),)", "'not' needs 1"),
        ("(('and', ('lying', 0)),)", "'and' needs two or more"),
        ("(('->', ('lying', 0)),)", "'->' needs 2"),
        ("(('not', 'lying'),)", r"expected \(connective, ...\)"),
        (repr((("lying", 0),) * 13), "13 people"),
    ],
)
def test_malformed_statements_are_named(text, complaint):
    with pytest.raises(PuzzleError, match=complaint) as caught:
        parse_statements(text)
    assert "\n" not in str(caught.value)


def test_solve_refuses_sizes_it_cannot_hold():
    with pytest.raises(PuzzleError, match="13 people"):
        solve((T0,) * 13)
    with pytest.raises(PuzzleError, match="0 people"):
        solve(())


@settings(max_examples=100, deadline=None)
@given(statements_of(3), st.randoms(use_true_random=False))
def test_canonical_ignores_operand_order_and_keeps_truth(statement, rng):
    def shuffled(s):
        if s[0] in ("telling-truth", "lying"):
            return s
        parts = [shuffled(part) for part in s[1:]]
        if s[0] in ("and", "or", "<=>"):
            rng.shuffle(parts)
        return (s[0], *parts)

    assert canonical(shuffled(statement)) == canonical(statement)
    for row in itertools.product((True, False), repeat=3):
        assert evaluate(canonical(statement), row) == evaluate(statement, row)
