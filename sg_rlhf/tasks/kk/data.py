"""Knights & Knaves data: generated splits, Logic-RL's parquet, the official JSONL, our records."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sg_rlhf.tasks.kk.grading import score
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import (
    MAX_PEOPLE,
    MIN_PEOPLE,
    Puzzle,
    PuzzleError,
    generate,
    parse_statements,
    solve,
)

# What is read of a row; the other columns of the Logic-RL parquet follow from these.
COLUMNS = ("quiz", "names", "solution", "solution_text_format", "statements")

Tick = Callable[[], object]


class DataError(ValueError):
    """A data set that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Splits:
    """Train and test puzzles without overlap, and how many duplicates were dropped on the way."""

    train: list[Puzzle]
    test: list[Puzzle]
    duplicates: int = 0

    @property
    def shared_structures(self) -> int:
        """Test puzzles whose statements occur in train under other names or another wording."""
        structures = {puzzle.structure for puzzle in self.train}
        return sum(puzzle.structure in structures for puzzle in self.test)


def generate_splits(
    sizes: Iterable[int],
    per_size: int,
    test_per_size: int,
    seed: int,
    *,
    max_depth: int = 2,
    width: int = 2,
    distinct: str = "structure",
    on_puzzle: Tick | None = None,
) -> Splits:
    """Generate `per_size` train and `test_per_size` test puzzles for each number of people.

    The test puzzles are drawn first, so they stay the same when `per_size` changes. They differ in
    structure from each other and from all of train, also where `distinct` is "names".

    Raises:
        PuzzleError: bad arguments, or too few distinct puzzles exist (see `puzzle.generate`).
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
    return check_splits(train, test)


def split(puzzles: Sequence[Puzzle], test_fraction: float, seed: int) -> Splits:
    """Hold out a fraction of each size, at random by `seed`, after dropping duplicates.

    Raises:
        DataError: the fraction is outside [0, 1).
    """
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test fraction must be at least 0 and below 1, got {test_fraction}")
    unique = _drop_duplicates(puzzles)
    held_out: set[int] = set()
    for n_people in sorted({puzzle.n_people for puzzle in unique}):
        rows = [i for i, puzzle in enumerate(unique) if puzzle.n_people == n_people]
        random.Random(f"kk split n={n_people} seed={seed}").shuffle(rows)
        held_out.update(rows[: round(test_fraction * len(rows))])
    train = [puzzle for i, puzzle in enumerate(unique) if i not in held_out]
    test = [puzzle for i, puzzle in enumerate(unique) if i in held_out]
    return Splits(train, test, duplicates=len(puzzles) - len(unique))


def check_splits(train: Sequence[Puzzle], test: Sequence[Puzzle]) -> Splits:
    """Drop duplicates within each split and refuse a test puzzle that is also in train.

    Two puzzles are the same if the same people say the same things, in whatever order or wording
    (`Puzzle.identity`), or if their quiz texts are equal.

    Raises:
        DataError: naming how many puzzles overlap and the first of them.
    """
    unique_train, unique_test = _drop_duplicates(train), _drop_duplicates(test)
    known = {key for puzzle in unique_train for key in _keys(puzzle)}
    overlap = [puzzle for puzzle in unique_test if any(key in known for key in _keys(puzzle))]
    if overlap:
        raise DataError(
            f"{len(overlap)} of {len(unique_test)} test puzzles are also in train, "
            f"the first is {_short(overlap[0].quiz)}; expected no overlap"
        )
    dropped = len(train) + len(test) - len(unique_train) - len(unique_test)
    return Splits(unique_train, unique_test, dropped)


def shuffled(puzzles: Sequence[Puzzle]) -> list[Puzzle]:
    """The same puzzles with the sizes mixed, always in the same order.

    A run that takes the first rows of a file (`data.max_samples`) then gets every size.
    """
    mixed = list(puzzles)
    random.Random("kk order").shuffle(mixed)
    return mixed


def read_parquet(path: str | Path, on_row: Tick | None = None) -> list[Puzzle]:
    """Read and validate a file of Logic-RL's shape (`.parquet`) or the official one (`.jsonl`).

    Every row must hold the columns of `COLUMNS`, have exactly one solution, the given one, and a
    gold answer that the reward function accepts.

    Args:
        on_row: called after each row, for a progress bar.

    Raises:
        DataError: one line with the file, the row (counted from 1), the field, its value and what
            was expected.
    """
    path = Path(path)
    puzzles = []
    for number, row in enumerate(_rows(path), start=1):
        try:
            puzzles.append(_parse_row(row))
        except ValueError as error:
            raise DataError(f"{path}: row {number}: {error}") from None
        if on_row is not None:
            on_row()
    if not puzzles:
        raise DataError(f"{path}: no rows, expected at least one puzzle")
    return puzzles


def to_records(
    puzzles: Iterable[Puzzle], prompt: Callable[[str], str] = build_prompt
) -> Iterator[dict[str, Any]]:
    """The JSONL records that OpenRLHF's loader reads: `input`, `answer`, `datasource` and our own.

    Args:
        prompt: quiz -> prompt, for another model family's chat template.
    """
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
        raise DataError(f"{path}: no such file, expected a Logic-RL parquet or K&K jsonl file")
    if path.suffix == ".jsonl":
        yield from _json_rows(path)
        return
    # pyarrow takes a while to load and the trainer's graders do not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in COLUMNS if name not in present]
            if missing:
                raise DataError(
                    f"{path}: column {missing[0]!r} is missing, expected {', '.join(COLUMNS)}, "
                    f"found {', '.join(present)}"
                )
            for batch in file.iter_batches(columns=list(COLUMNS)):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {_one_line(error)}") from None


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: row {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: row {number}: {_short(row)}, expected a JSON object")
            yield row


def _parse_row(row: Mapping[str, Any]) -> Puzzle:
    for column in COLUMNS:
        if row.get(column) is None:
            raise DataError(f"{column}: missing, expected the columns {', '.join(COLUMNS)}")
    names, solution, quiz = row["names"], row["solution"], row["quiz"]
    gold = row["solution_text_format"]
    if not isinstance(quiz, str) or not quiz.strip():
        raise DataError(f"quiz: {_short(quiz)}, expected the puzzle's text")
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) and name for name in names)
        or len(set(names)) != len(names)
        or not MIN_PEOPLE <= len(names) <= MAX_PEOPLE
    ):
        raise DataError(
            f"names: {_short(names)}, expected {MIN_PEOPLE} to {MAX_PEOPLE} different names"
        )
    unnamed = [name for name in names if name not in quiz]
    if unnamed:
        raise DataError(f"names: {unnamed[0]!r} does not occur in the quiz {_short(quiz)}")
    if (
        not isinstance(solution, list)
        or not all(isinstance(value, bool) for value in solution)
        or len(solution) != len(names)
    ):
        raise DataError(
            f"solution: {_short(solution)}, expected true or false for each of {len(names)} names"
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
            f"statements: {_short(row['statements'])} have the solutions {_short(solutions)}, "
            f"expected exactly one, {tuple(solution)}"
        )
    puzzle = Puzzle(tuple(names), statements, tuple(solution), quiz)
    expected = puzzle.solution_text_format
    if gold != expected:
        raise DataError(f"solution_text_format: {_short(gold)}, expected {_short(expected)}")
    # A name such as "knightly" would make the gold itself ungradable.
    if not score(f"</think><answer>{gold}</answer>", gold).correct:
        raise DataError(f"names: {_short(names)}, the reward cannot read an answer with these")
    return puzzle


def _drop_duplicates(puzzles: Iterable[Puzzle]) -> list[Puzzle]:
    seen: set[object] = set()
    unique = []
    for puzzle in puzzles:
        keys = _keys(puzzle)
        if not any(key in seen for key in keys):
            unique.append(puzzle)
        seen.update(keys)
    return unique


def _keys(puzzle: Puzzle) -> tuple[object, object]:
    return puzzle.identity, puzzle.quiz


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
