"""Knights & Knaves data: generated splits, Logic-RL's parquet, the official JSONL, our records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.records import (
    DataError,
    ProgressCallback,
    json_objects,
    parquet_rows,
    read_each,
    split_held_out,
)
from sg_rlhf.tasks.kk.grading import READINGS, score
from sg_rlhf.tasks.kk.logic import MAX_PEOPLE, MIN_PEOPLE, PuzzleError, parse_statements, solve
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate

# What is read of a row; the other columns of the Logic-RL parquet follow from these.
COLUMNS = ("quiz", "names", "solution", "solution_text_format", "statements")
FILES = "a Logic-RL parquet or K&K jsonl file"


def generate_splits(
    sizes: Iterable[int],
    per_size: int,
    test_per_size: int,
    seed: int,
    *,
    max_depth: int = 2,
    width: int = 2,
    distinct: str = "structure",
    on_puzzle: ProgressCallback | None = None,
) -> tuple[list[Puzzle], list[Puzzle]]:
    """Generate `per_size` train and `test_per_size` test puzzles for each number of people.

    The test puzzles are drawn first, so they stay the same when `per_size` changes. They differ in
    structure from each other and from all of train. Raises as `puzzle.generate`.
    """
    if per_size < 0 or test_per_size < 0:
        raise PuzzleError(
            f"per_size and test_per_size must not be negative, got {per_size} and {test_per_size}"
        )
    train: list[Puzzle] = []
    test: list[Puzzle] = []
    for n_people in sorted(set(sizes)):
        draw = partial(
            generate, n_people, seed=seed, max_depth=max_depth, width=width, on_puzzle=on_puzzle
        )
        held_out = draw(test_per_size)
        test += held_out
        train += draw(per_size, exclude=held_out, distinct=distinct)
    return train, test


def split(
    puzzles: Sequence[Puzzle], test: Sequence[Puzzle] | None, test_fraction: float, seed: int
) -> tuple[list[Puzzle], list[Puzzle], dict[str, int]]:
    """Train and test puzzles without overlap, and without duplicates in either.

    Two puzzles are the same if the same people say the same things, in whatever order or wording
    (`Puzzle.identity`), or if their quiz texts are equal.

    Args:
        test: None: hold out `test_fraction` of each size, at random by `seed`.

    Returns:
        Train puzzles, test puzzles, and two counts: dropped duplicates, and test puzzles whose
        statements occur in train under other names or another wording.

    Raises:
        DataError: test puzzles are also in train, or the fraction is outside [0, 1).
    """
    train = _drop_duplicates(puzzles)
    dropped = len(puzzles) - len(train)
    if test is None:
        train, held_out = split_held_out(
            train,
            lambda puzzle: puzzle.n_people,
            test_fraction,
            lambda n_people: f"kk split n={n_people} seed={seed}",
        )
    else:
        held_out = _drop_duplicates(test)
        dropped += len(test) - len(held_out)
        known = {key for puzzle in train for key in _keys(puzzle)}
        overlap = [puzzle for puzzle in held_out if any(key in known for key in _keys(puzzle))]
        if overlap:
            raise DataError(
                f"{len(overlap)} of {len(held_out)} test puzzles are also in train, "
                f"the first is {truncate(overlap[0].quiz)}; expected no overlap"
            )
    structures = {puzzle.structure for puzzle in train}
    counts = {
        "duplicates_dropped": dropped,
        "test_structures_in_train": sum(puzzle.structure in structures for puzzle in held_out),
    }
    return train, held_out, counts


def read_puzzles(path: str | Path, on_row: ProgressCallback | None = None) -> list[Puzzle]:
    """Read a file of Logic-RL's shape (`.parquet`) or the official one (`.jsonl`).

    Every row must have exactly one solution, the given one, and a gold that the reward accepts;
    else a `DataError` names file, row and field.
    """
    path = Path(path)
    return read_each(path, _rows(path), lambda row, _: _parse_row(row), "puzzle", on_row)


def to_records(
    puzzles: Iterable[Puzzle], prompt: Callable[[str], str] = build_prompt
) -> Iterator[dict[str, Any]]:
    """The JSONL records that OpenRLHF's loader reads, and further fields of ours."""
    for puzzle in puzzles:
        yield {
            "input": prompt(puzzle.quiz),
            "answer": puzzle.solution_text_format,
            "datasource": f"kk_{puzzle.n_people}ppl",
            "quiz": puzzle.quiz,
            "n_people": puzzle.n_people,
            "names": list(puzzle.names),
            # As text, like the parquet: a column of nested mixed lists has no Arrow type.
            "statements": repr(puzzle.statements),
            "solution": list(puzzle.solution),
        }


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected {FILES}")
    return json_objects(path) if path.suffix == ".jsonl" else parquet_rows(path, _columns)


def _columns(present: list[str]) -> list[str]:
    missing = [name for name in COLUMNS if name not in present]
    if missing:
        raise DataError(
            f"column {missing[0]!r} is missing, expected {', '.join(COLUMNS)}, "
            f"found {', '.join(present)}"
        )
    return list(COLUMNS)


def _parse_row(row: Mapping[str, Any]) -> Puzzle:
    for column in COLUMNS:
        if row.get(column) is None:
            raise DataError(f"{column}: missing, expected the columns {', '.join(COLUMNS)}")
    names, solution, quiz = row["names"], row["solution"], row["quiz"]
    gold = row["solution_text_format"]
    if not isinstance(quiz, str) or not quiz.strip():
        raise DataError(f"quiz: {truncate(quiz)}, expected the puzzle's text")
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) and name for name in names)
        or len(set(names)) != len(names)
        or not MIN_PEOPLE <= len(names) <= MAX_PEOPLE
    ):
        raise DataError(
            f"names: {truncate(names)}, expected {MIN_PEOPLE} to {MAX_PEOPLE} different names"
        )
    unnamed = [name for name in names if name not in quiz]
    if unnamed:
        raise DataError(f"names: {unnamed[0]!r} does not occur in the quiz {truncate(quiz)}")
    if (
        not isinstance(solution, list)
        or not all(isinstance(value, bool) for value in solution)
        or len(solution) != len(names)
    ):
        raise DataError(
            f"solution: {truncate(solution)}, expected true or false for each of {len(names)} names"
        )
    try:
        statements = parse_statements(row["statements"])
    except PuzzleError as error:
        raise DataError(f"statements: {error}") from None
    if len(statements) != len(names):
        raise DataError(
            f"statements: {len(statements)} of them, expected one for each of {len(names)} names"
        )
    solutions = solve(statements)
    if solutions != [tuple(solution)]:
        raise DataError(
            f"statements: {truncate(row['statements'])} have the solutions {truncate(solutions)}, "
            f"expected exactly one, {tuple(solution)}"
        )
    puzzle = Puzzle(tuple(names), statements, tuple(solution), quiz)
    expected = puzzle.solution_text_format
    if gold != expected:
        raise DataError(f"solution_text_format: {truncate(gold)}, expected {truncate(expected)}")
    # A name such as "knightly" or "Ann, Mia" would make the gold itself ungradable.
    response = f"</think><answer>{gold}</answer>"
    if not all(score(response, gold, reading=reading).correct for reading in READINGS):
        raise DataError(f"names: {truncate(names)}, the reward cannot read an answer with these")
    return puzzle


def find_duplicates(puzzles: Iterable[Puzzle]) -> list[tuple[int, int]]:
    """(i, j) for every puzzle i that occurred before, first as puzzle j (`split`)."""
    first: dict[object, int] = {}
    found = []
    for i, puzzle in enumerate(puzzles):
        earlier = [first.setdefault(key, i) for key in _keys(puzzle)]
        if min(earlier) < i:
            found.append((i, min(earlier)))
    return found


def _drop_duplicates(puzzles: Sequence[Puzzle]) -> list[Puzzle]:
    repeated = {i for i, _ in find_duplicates(puzzles)}
    return [puzzle for i, puzzle in enumerate(puzzles) if i not in repeated]


def _keys(puzzle: Puzzle) -> tuple[object, object]:
    return puzzle.identity, puzzle.quiz
