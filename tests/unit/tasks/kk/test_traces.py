"""Warm-start traces: the clean ones are right in every word, the others as wrong as asked."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from sg_rlhf.tasks.kk.grading import Reason, score
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.kk.traces import trace
from tests.unit.tasks.kk.oracles import as_python, read_claim

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
