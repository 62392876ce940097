"""The logic of puzzles, and solutions in steps."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.grading import Reason, score
from sg_rlhf.tasks.kk.logic import PuzzleError, canonical, evaluate, parse_statements, solve
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.kk.traces import trace
from tests.unit.tasks.kk.oracles import (
    as_python,
    brute_force,
    puzzle_statements,
    read_claim,
    statements_of,
)

# -- Statements: reading them, their truth, and the solver against brute force -------------------


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


# -- Warm-start traces: the clean ones are right in every word, the others as wrong as asked -----


PUZZLES = [puzzle for n in (2, 3, 4, 5) for puzzle in generate(n, 40, seed=4)]


def read_line(line: str, names: list[str]):
    """(assignment, [(speaker, claim, verdict)]) of one line."""
    match = re.fullmatch(r"Try ((?:\w+=(?:knight|knave) )+)(.*)", line)
    roles = dict(pair.split("=") for pair in match[1].split())
    assert list(roles) == names
    said = re.findall(r"(\w+): (.*?) (ok|no)(?= |$)", match[2])
    assert " ".join(f"{who}: {claim} {verdict}" for who, claim, verdict in said) == match[2]
    return [roles[name] == "knight" for name in names], said


def check_marks(claim: str, names: list[str], k: list[bool]) -> None:
    marked = re.findall(r"(\w+ is (?:not )?a \w+) ([TF])", claim)
    assert len(marked) == claim.count(" is ")
    for simple, mark in marked:
        assert (mark == "T") == bool(eval(as_python(read_claim(simple, names)), {"k": k}))


@pytest.mark.parametrize("puzzle", PUZZLES[::4], ids=str)
def test_a_clean_search_is_right_in_every_word(puzzle):
    names = list(puzzle.names)
    text = trace(puzzle, random.Random(0))
    search, _, answer = text.partition("</think>")
    lines = search.split("\n")
    order = itertools.product((True, False), repeat=len(names))
    for line, expected in zip(lines, order, strict=False):
        k, said = read_line(line, names)
        assert tuple(k) == expected
        assert [who for who, _, _ in said] == names[: len(said)]
        for i, (_, claim, verdict) in enumerate(said):
            check_marks(claim, names, k)
            statement = read_claim(re.sub(r" [TF]\b", "", claim), names)
            assert statement == puzzle.statements[i]
            truth = bool(eval(as_python(statement), {"k": k}))
            assert (verdict == "ok") == (truth == k[i])
        verdicts = [verdict for _, _, verdict in said]
        assert "no" not in verdicts[:-1]
        assert (verdicts[-1] == "no") == (line is not lines[-1])
    assert answer == f"<answer>{puzzle.solution_text_format}</answer>"


def test_a_clean_search_scores_3_and_needs_no_randomness():
    for puzzle in PUZZLES:
        text = trace(puzzle, random.Random(1))
        assert score(text, puzzle.solution_text_format).reward == 3.0
        assert text == trace(puzzle, random.Random(2))


def test_the_format_by_example():
    statements = (("lying", 1), ("->", ("telling-truth", 0), ("not", ("telling-truth", 1))))
    puzzle = Puzzle(("Luke", "Ethan"), statements, (False, True), "")
    assert trace(puzzle, random.Random(0)) == (
        "Try Luke=knight Ethan=knight Luke: Ethan is a knave F no\n"
        "Try Luke=knight Ethan=knave Luke: Ethan is a knave T ok "
        "Ethan: If Luke is a knight T then Ethan is not a knight T no\n"
        "Try Luke=knave Ethan=knight Luke: Ethan is a knave F ok "
        "Ethan: If Luke is a knight F then Ethan is not a knight F ok"
        "</think><answer>(1) Luke is a knave\n(2) Ethan is a knight</answer>"
    )


def test_guesses_are_well_formed_and_uniform():
    rng = random.Random(0)
    (puzzle,) = generate(3, 1, seed=0)
    results = [score(trace(puzzle, rng, "guess"), puzzle.solution_text_format) for _ in range(800)]
    assert {r.reason for r in results} == {Reason.CORRECT, Reason.WRONG}
    assert 70 <= sum(r.correct for r in results) <= 130  # 1 in 8
    assert trace(puzzle, rng, "guess").startswith("Guess</think><answer>(1) ")


def test_flipped_verdicts_stay_well_formed_and_consistent_with_themselves():
    rng = random.Random(0)
    n_written = n_flipped = n_wrong = 0
    for puzzle in PUZZLES:
        names = list(puzzle.names)
        text = trace(puzzle, rng, flip_verdict_p=0.2)
        result = score(text, puzzle.solution_text_format)
        assert result.reason in (Reason.CORRECT, Reason.WRONG)
        n_wrong += not result.correct
        lines = text.partition("</think>")[0].split("\n")
        tried = [line for line in lines if line != "Guess"]
        for line in tried:
            k, said = read_line(line, names)
            verdicts = [verdict for _, _, verdict in said]
            assert "no" not in verdicts[:-1]
            assert (verdicts[-1] == "no") == (line is not lines[-1])
            for i, (_, claim, verdict) in enumerate(said):
                check_marks(claim, names, k)
                truth = bool(eval(as_python(puzzle.statements[i]), {"k": k}))
                n_written += 1
                n_flipped += (verdict == "ok") != (truth == k[i])
    assert 0.15 < n_flipped / n_written < 0.25
    assert n_wrong > len(PUZZLES) / 4


def test_all_verdicts_flipped_ends():
    for puzzle in PUZZLES[:20]:
        text = trace(puzzle, random.Random(0), flip_verdict_p=1.0)
        assert score(text, puzzle.solution_text_format).format_ok


def test_bad_arguments():
    with pytest.raises(ValueError, match="style"):
        trace(PUZZLES[0], random.Random(0), "chat")
    with pytest.raises(ValueError, match="flip_verdict_p"):
        trace(PUZZLES[0], random.Random(0), flip_verdict_p=1.5)
