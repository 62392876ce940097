"""The generator: as many puzzles as asked, each with one solution, the same for a seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.logic import PuzzleError
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.kk.render import NAMES, render_claim, render_quiz
from tests.unit.tasks.kk.oracles import as_python, brute_force, read_quiz


def leaves(statement):
    if statement[0] in ("telling-truth", "lying"):
        return [statement]
    return [leaf for part in statement[1:] for leaf in leaves(part)]


def depth(statement):
    if statement[0] in ("telling-truth", "lying"):
        return 1
    return 1 + max(depth(part) for part in statement[1:])


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(0, 40), st.integers(-3, 2**63), st.integers(2, 3))
def test_every_puzzle_has_exactly_its_solution(n_people, count, seed, max_depth):
    puzzles = generate(n_people, count, seed, max_depth=max_depth)
    assert len(puzzles) == count
    assert len({p.structure for p in puzzles}) == len({p.quiz for p in puzzles}) == count
    for puzzle in puzzles:
        assert brute_force(puzzle.statements) == [puzzle.solution]
        assert len(set(puzzle.names)) == n_people
        for speaker, statement in enumerate(puzzle.statements):
            assert depth(statement) <= max_depth
            assert ("lying", speaker) not in leaves(statement)
            assert statement != ("not", ("telling-truth", speaker))


@pytest.mark.parametrize("n_people", range(2, 13))
def test_every_size_from_2_to_12(n_people):
    puzzles = generate(n_people, 20, seed=1)
    assert [p.n_people for p in puzzles] == [n_people] * 20
    if n_people > 7:  # the smaller ones are checked above
        assert brute_force(puzzles[0].statements) == [puzzles[0].solution]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("n_people", n) for n in (-1, 0, 1, 13)],
        *[("max_depth", 0), ("max_depth", 7), ("width", 1), ("width", 9)],
        *[("distinct", "x"), ("count", -1)],
    ],
)
def test_other_arguments_are_refused(name, bad):
    with pytest.raises(PuzzleError, match=name):
        generate(**{"n_people": 3, "count": 1, "seed": 0, name: bad})


def test_a_smaller_count_is_a_prefix_and_other_calls_do_not_matter():
    alone = generate(4, 30, seed=7)
    generate(3, 5, seed=7)
    assert generate(4, 10, seed=7) == alone[:10]
    assert generate(4, 10, seed=8) != alone[:10]


def test_the_same_in_every_process():
    code = (
        "import hashlib; from sg_rlhf.tasks.kk.puzzle import generate; "
        "print(hashlib.sha256(repr(generate(5, 20, 3)).encode()).hexdigest())"
    )
    ours = hashlib.sha256(repr(generate(5, 20, 3)).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        printed = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert printed.stdout.strip() == ours


def test_two_people_have_184_puzzles_and_one_more_is_a_clear_error():
    puzzles = generate(2, 184, seed=0)
    assert len({p.structure for p in puzzles}) == 184
    with pytest.raises(PuzzleError, match="only 184 of 185 puzzles of 2 people"):
        generate(2, 185, seed=0)


def test_a_structure_may_return_with_other_names_if_asked():
    puzzles = generate(2, 600, seed=0, distinct="names")
    assert len({p.identity for p in puzzles}) == 600
    assert len({p.structure for p in puzzles}) <= 184


def test_excluded_structures_do_not_come_back():
    held_out = generate(2, 100, seed=0)
    rest = generate(2, 84, seed=5, exclude=held_out)
    assert not {p.structure for p in rest} & {p.structure for p in held_out}
    named = generate(2, 300, seed=5, exclude=held_out, distinct="names")
    assert not {p.structure for p in named} & {p.structure for p in held_out}
    with pytest.raises(PuzzleError, match="not counting 100 excluded"):
        generate(2, 85, seed=5, exclude=held_out)


def test_impossible_requests_end():
    # Two people with plain claims only never have exactly one solution.
    with pytest.raises(PuzzleError, match="only 0 of 1 puzzles"):
        generate(2, 1, seed=0, max_depth=1)


def test_wide_and_deep_claims_end_too():
    assert len(generate(2, 5, seed=0, width=6)) == 5
    puzzles = generate(3, 5, seed=0, max_depth=6, width=6)
    assert all(brute_force(p.statements) == [p.solution] for p in puzzles)


def test_on_puzzle_counts_the_accepted_ones():
    calls = []
    generate(3, 25, seed=0, on_puzzle=lambda: calls.append(1))
    assert len(calls) == 25


@pytest.mark.parametrize("n_people", [2, 3, 7])
def test_the_quiz_says_what_the_statements_say(n_people):
    for puzzle in generate(n_people, 120, seed=2):
        assert read_quiz(puzzle.quiz) == (list(puzzle.names), puzzle.statements)


def test_all_ways_of_reporting_a_claim_occur():
    said = " ".join(p.quiz for p in generate(5, 60, seed=0))
    for words in (
        " said that", " told you that", " expressed that", ' said, "', ' noted, "', ' stated, "',
        ' remarked, "', ' commented, "', ' asserted: "', ' was heard saying, "', ' put it, "',
        "According to ", "'s words: \"", "In a statement by ", '" - ', '," ',
    ):  # fmt: skip
        assert words in said


def test_language_of_a_whole_puzzle():
    names = ("Zoey", "Jack", "Mia")
    statements = (
        ("->", ("lying", 1), ("not", ("telling-truth", 2))),
        ("<=>", ("telling-truth", 0), ("lying", 2)),
        ("not", ("lying", 0)),
    )

    class First:
        def choice(self, frames):
            return frames[0]

    puzzle = Puzzle(names, statements, (True, False, True), render_quiz(names, statements, First()))
    assert puzzle.quiz == (
        "A very special island is inhabited only by knights and knaves. Knights always tell the "
        "truth, and knaves always lie. You meet 3 inhabitants: Zoey, Jack, and Mia. Zoey said that "
        "If Jack is a knave then Mia is not a knight. Jack said that Zoey is a knight if and only "
        "if Mia is a knave. Mia said that Zoey is not a knave. So who is a knight and who is a "
        "knave?"
    )
    assert puzzle.solution_text_format == (
        "(1) Zoey is a knight\n(2) Jack is a knave\n(3) Mia is a knight"
    )


def test_nested_claims_are_unambiguous():
    deep = ("not", ("or", ("and", ("lying", 0), ("lying", 1)), ("not", ("lying", 0))))
    assert render_claim(deep, ("Ann", "Bob")) == (
        "it is not the case that ((Ann is a knave and Bob is a knave) or Ann is not a knave)"
    )


def test_identity_ignores_order_and_wording():
    one = Puzzle(
        ("Ann", "Bob"), (("lying", 1), ("or", ("lying", 0), ("lying", 1))), (True, False), "x"
    )
    two = Puzzle(
        ("Bob", "Ann"), (("or", ("lying", 0), ("lying", 1)), ("lying", 0)), (False, True), "y"
    )
    assert one.identity == two.identity
    assert one.structure != two.structure
    assert as_python(one.statements[0]) == "(not k[1])"


def test_names_are_distinct_words():
    assert len(set(NAMES)) == len(NAMES) >= 12
    assert all(name.isalpha() and name.istitle() for name in NAMES)
