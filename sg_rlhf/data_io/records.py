"""Read the rows of data set files, with one-line errors, and split off held-out rows.

Used by the readers of the domains, which know what a row must have.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sg_rlhf.common.text import OneLineError, single_line, truncate

Raw = TypeVar("Raw")
Row = TypeVar("Row")

ProgressCallback = Callable[[], object]

#: Maximum bytes of one line of JSON.
LONGEST_LINE = 64 * 2**20


class DataError(OneLineError):
    """A data set that cannot be used; the message is one line for the user."""


def read_each(
    path: Path,
    items: Iterable[Raw],
    parse: Callable[[Raw, int], Row],
    kind: str,
    on_row: ProgressCallback | None = None,
) -> list[Row]:
    """Parse every item of a file.

    Args:
        parse: (item, row number from 1) -> row. It raises `ValueError` for a bad item.
        kind: what a row is called in the message about an empty file.
        on_row: called after each row, for a progress bar.

    Raises:
        DataError: one line with the file, the row number, and the error of `parse`.
    """
    rows = []
    for number, item in enumerate(items, start=1):
        try:
            rows.append(parse(item, number))
        except ValueError as error:
            raise DataError(f"{path}: row {number}: {error}") from None
        if on_row is not None:
            on_row()
    if not rows:
        raise DataError(f"{path}: no rows, expected at least one {kind}")
    return rows


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON value of each line.

    Raises:
        DataError: a line is not JSON in UTF-8 or longer than :data:`LONGEST_LINE`, or the file
            cannot be read.
    """
    yield from (value for _, value in numbered_json_lines(path))


def numbered_json_lines(
    path: Path, skip_blank: bool = False, parse_float: Callable[[str], float] = float
) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, JSON value) of each line; see :func:`json_lines`.

    Args:
        skip_blank: ignore lines of white space, as Arrow's reader does.
        parse_float: text of a number that is no integer -> its value.
    """
    for number, line in enumerate(_lines(path), start=1):
        if skip_blank and not line.strip():
            continue
        try:
            text = line.rstrip(b"\r\n").decode()
            value = json.loads(text, parse_float=parse_float, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: row {number}: not JSON: {_why(error)}") from None
        yield number, value


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            number = 1
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{path}: row {number}: longer than {LONGEST_LINE // 2**20} MiB, "
                        "expected one row a line"
                    )
                yield line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
                number += 1
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def refuse_constant(constant: str) -> Any:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(f"{constant} is no number of JSON")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte {error.start} of the line)"
    return single_line(error)


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; a line that is none: `DataError`."""
    for number, row in enumerate(json_lines(path), start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number}: {truncate(row)}, expected a JSON object")
        yield row


def parquet_rows(
    path: Path, choose: Callable[[list[str]], list[str]] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file; see :func:`parquet_batches`."""
    for batch in parquet_batches(path, choose):
        yield from batch.to_pylist()


def parquet_batches(
    path: Path, choose: Callable[[list[str]], list[str]] | None = None
) -> Iterator[Any]:
    """Yield the record batches of a Parquet file.

    Args:
        choose: all columns -> columns to read; default: all. It raises `DataError` for a missing
            column; the file's name is added.

    Raises:
        DataError: not a readable Parquet file, or an error of `choose`.
    """
    # Imported here: pyarrow loads slowly, and the trainer's graders do not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            try:
                columns = None if choose is None else choose(file.schema_arrow.names)
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            yield from file.iter_batches(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {single_line(error)}") from None


def mixed(rows: Sequence[Row], seed: str) -> list[Row]:
    """The same rows in a random order, the same one for the same seed.

    A run that takes the first rows of a file (`data.max_samples`) then gets rows of every group.
    """
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order


def check_fraction(test_fraction: float) -> None:
    """Check the fraction of rows to hold out; outside [0, 1): `DataError`."""
    if not 0.0 <= test_fraction < 1.0:
        raise DataError(f"test fraction must be at least 0 and below 1, got {test_fraction}")


def split_held_out(
    items: Sequence[Row],
    group: Callable[[Row], Any],
    test_fraction: float,
    seed_of: Callable[[Any], str],
) -> tuple[list[Row], list[Row]]:
    """Train and test items, in the original order: `test_fraction` of each group is held out.

    Args:
        test_fraction: from 0 to below 1, else `DataError`.
        seed_of: group -> seed of its draw, so that one group's size does not affect another's.
    """
    check_fraction(test_fraction)
    held_out: set[int] = set()
    for value in sorted({group(item) for item in items}):
        indices = [i for i, item in enumerate(items) if group(item) == value]
        random.Random(seed_of(value)).shuffle(indices)
        held_out.update(indices[: round(test_fraction * len(indices))])
    train = [item for i, item in enumerate(items) if i not in held_out]
    return train, [item for i, item in enumerate(items) if i in held_out]
