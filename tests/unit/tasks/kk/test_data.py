"""Reading, checking and splitting K&K data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sg_rlhf.tasks.kk.data import (
    DataError,
    generate_splits,
    read_puzzles,
    split,
    to_records,
)
from sg_rlhf.tasks.kk.logic import PuzzleError, parse_statements, solve
from sg_rlhf.tasks.kk.puzzle import generate
from tests.unit.tasks.kk.oracles import LOGIC_RL_PROMPT, logic_rl_row, write_parquet

PUZZLES = [puzzle for n in (2, 3, 5) for puzzle in generate(n, 20, seed=3)]


def rows_of(puzzles):
    return [logic_rl_row(puzzle, i) for i, puzzle in enumerate(puzzles)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_parquet_and_jsonl_are_read_back_as_the_same_puzzles(tmp_path):
    ticks = []
    parquet = write_parquet(tmp_path / "kk.parquet", rows_of(PUZZLES))
    assert read_puzzles(parquet, on_row=lambda: ticks.append(1)) == PUZZLES
    assert len(ticks) == len(PUZZLES)
    official = [{k: v for k, v in r.items() if k != "prompt"} for r in rows_of(PUZZLES)]
    assert read_puzzles(write_jsonl(tmp_path / "kk.jsonl", official)) == PUZZLES


BAD_ROWS = {
    "quiz": (" ", "quiz: ' ', expected the puzzle's text"),
    "names": (["Ann", "Ann", "Bob"], "names: .*expected 2 to 12 different names"),
    "solution": ([True, False], r"solution: \[True, False\], expected true or false for each of 3"),
    "solution_text_format": ("(1) Ann is a knight", "solution_text_format: .*expected '"),
    "statements": ("(('lying', 9),)", "statements: statement of person 0"),
}


@pytest.mark.parametrize("column", BAD_ROWS)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_bad_value_names_file_row_field_and_expectation(tmp_path, column, suffix):
    value, complaint = BAD_ROWS[column]
    rows = rows_of(PUZZLES[20:40])
    rows[6][column] = value
    write = write_parquet if suffix == "parquet" else write_jsonl
    path = write(tmp_path / f"bad.{suffix}", rows)
    with pytest.raises(DataError, match=rf"bad\.{suffix}: row 7: {complaint}") as caught:
        read_puzzles(path)
    assert "\n" not in str(caught.value)


TWO = PUZZLES[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"solution": [not knight for knight in TWO.solution]}, "statements: .*exactly one"),
        (
            {"statements": (("telling-truth", 1), ("telling-truth", 0)), "solution": (True, True)},
            "statements: .*expected exactly one",
        ),
        ({"names": ("Ann", "Bob")}, "names: 'Ann' does not occur in the quiz"),
        (
            {
                "names": ("Knightley", TWO.names[1]),
                "quiz": TWO.quiz.replace(TWO.names[0], "Knightley"),
            },
            "names: .*reward cannot read",
        ),
    ],
    ids=["wrong solution", "two solutions", "name not in the quiz", "name that breaks grading"],
)
def test_a_puzzle_that_cannot_be_trained_on_is_refused(tmp_path, changes, complaint):
    path = write_parquet(tmp_path / "kk.parquet", rows_of([PUZZLES[1], replace(TWO, **changes)]))
    with pytest.raises(DataError, match=f"row 2: {complaint}"):
        read_puzzles(path)


@pytest.mark.parametrize(
    "column", ["quiz", "names", "solution", "solution_text_format", "statements"]
)
def test_a_missing_column_is_named(tmp_path, column):
    rows = [{k: v for k, v in row.items() if k != column} for row in rows_of(PUZZLES[:3])]
    with pytest.raises(DataError, match=f"column '{column}' is missing, expected quiz, names"):
        read_puzzles(write_parquet(tmp_path / "kk.parquet", rows))
    with pytest.raises(DataError, match=f"row 1: {column}: missing"):
        read_puzzles(write_jsonl(tmp_path / "kk.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.parquet", b"not a parquet", "not a readable parquet file"),
        ("x.jsonl", b"[1]\n", "row 1: .*expected a JSON object"),
        ("x.jsonl", b"", "no rows"),
    ],
)
def test_files_that_are_something_else(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_puzzles(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        read_puzzles(tmp_path / "absent.parquet")


def counts(duplicates, structures):
    return {"duplicates_dropped": duplicates, "test_structures_in_train": structures}


def test_generated_splits_have_the_sizes_asked_and_share_nothing():
    train, test = generate_splits([3, 2], 60, 20, seed=1)
    sizes = [p.n_people for p in train], [p.n_people for p in test]
    assert sizes == ([2] * 60 + [3] * 60, [2] * 20 + [3] * 20)
    assert split(train, test, 0.0, 0) == (train, test, counts(0, 0))
    # The held-out puzzles do not depend on how much is trained on.
    assert generate_splits([2, 3], 5, 20, seed=1)[1] == test


def test_names_may_return_in_train_but_test_stays_apart():
    train, test = generate_splits([2], 400, 50, seed=1, distinct="names")
    assert len(train) == 400
    assert split(train, test, 0.0, 0)[2] == counts(0, 0)
    with pytest.raises(PuzzleError, match="only 134 of 400"):
        generate_splits([2], 400, 50, seed=1)
    with pytest.raises(PuzzleError, match="must not be negative"):
        generate_splits([3], -1, 5, seed=1)


def test_seeded_split_by_size():
    train, test, _ = found = split(PUZZLES, None, 0.25, seed=1)
    assert [p.n_people for p in test] == [2] * 5 + [3] * 5 + [5] * 5
    assert sorted(p.quiz for p in train + test) == sorted(p.quiz for p in PUZZLES)
    assert split(PUZZLES, None, 0.25, seed=1) == found
    assert split(PUZZLES, None, 0.25, seed=2)[1] != test
    assert split(PUZZLES, None, 0.0, seed=1)[1] == []
    for bad in (1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="test fraction"):
            split(PUZZLES, None, bad, seed=1)


def swapped(puzzle):
    """The same two people saying the same things, named in the other order."""

    def swap(s):
        return (s[0], 1 - s[1]) if isinstance(s[1], int) else (s[0], *map(swap, s[1:]))

    first, second = puzzle.statements
    return replace(
        puzzle,
        names=puzzle.names[::-1],
        statements=(swap(second), swap(first)),
        solution=puzzle.solution[::-1],
        quiz="worded otherwise",
    )


def test_duplicates_are_dropped_and_overlap_is_refused():
    twin = swapped(PUZZLES[0])
    assert solve(twin.statements) == [twin.solution]
    found = split([*PUZZLES[:10], twin, PUZZLES[3]], PUZZLES[10:15], 0.0, 0)
    assert found == (PUZZLES[:10], PUZZLES[10:15], counts(2, 0))
    assert split([PUZZLES[0], twin, PUZZLES[1]], None, 0.0, seed=0)[2] == counts(1, 0)
    with pytest.raises(DataError, match="1 of 1 test puzzles are also in train"):
        split(PUZZLES[:10], [twin], 0.0, 0)
    other_text = replace(PUZZLES[30], quiz=PUZZLES[20].quiz)
    with pytest.raises(DataError, match="also in train"):
        split(PUZZLES[20:22], [other_text], 0.0, 0)


def test_shared_structures_are_counted():
    renamed = replace(PUZZLES[0], names=("Uma", "Vic"), quiz="other names")
    assert split([PUZZLES[0]], [renamed], 0.0, 0)[2] == counts(0, 1)


def test_records_hold_what_the_loader_reads():
    (record,) = to_records(PUZZLES[25:26])
    puzzle = PUZZLES[25]
    assert record["input"] == LOGIC_RL_PROMPT.replace("QUIZ", puzzle.quiz)
    assert record["answer"] == puzzle.solution_text_format
    assert record["datasource"] == "kk_3ppl"
    assert parse_statements(record["statements"]) == puzzle.statements
    assert (record["names"], record["n_people"]) == (list(puzzle.names), 3)
    assert json.loads(json.dumps(record)) == record
    (record,) = to_records([puzzle], prompt=lambda quiz: f"[{quiz}]")
    assert record["input"] == f"[{puzzle.quiz}]"
