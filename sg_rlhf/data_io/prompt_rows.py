"""Read the prompts of a run: one reader for the check before the run and for the run itself.

`datasets` guesses the types of JSON and CSV values: 7 becomes 7.0 next to a 2.5, "1961-08-04" a
date, CSV's 007 the number 7 and its NA a missing value. A reward compares texts, so local files are
read without it. It reads only folders and ids of a hub.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import single_line, truncate
from sg_rlhf.data_io.records import DataError, numbered_json_lines, parquet_batches, refuse_constant

#: Suffixes of files of prompts.
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
#: Field that names a row's group in the metrics of an evaluation.
DATASOURCE = "datasource"


class Number(float):
    """A number with the text that its file has for it.

    Attributes:
        text: such as ``2.50``.
    """

    text: str

    def __new__(cls, text: str) -> Number:
        """The number of a text."""
        self = super().__new__(cls, text)
        self.text = text
        return self


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row, or None if it is missing.

    ``a.b`` is the field b inside a, unless the row has a field with the name ``a.b``.
    """
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    value = row.get(outer)
    return value_of(value, inner) if dot and isinstance(value, Mapping) else None


def is_number(value: Any) -> bool:
    """Whether a value is a number or a truth value, and no text."""
    return isinstance(value, (int, float, decimal.Decimal))


def label_of(value: Any) -> Any:
    """A label as the reward gets it: the text of the file, or a list or an object of JSON.

    Raises:
        ValueError: a value that has no one text, such as a point in time.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return value.text
    if isinstance(value, float) and value != value:  # pandas' missing value
        return None
    return str(value) if isinstance(value, (int, float)) else _json_value(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _json_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_json_value(inner) for inner in value]
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if type(value) is datetime.date:
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{truncate(value)}, expected text in UTF-8") from None
    if value is None or isinstance(value, (str, int, float)):
        return float(value) if isinstance(value, Number) else value
    raise ValueError(f"{truncate(value)}, expected text: write this column as text")


@dataclass(frozen=True)
class PromptSchema:
    """Fields that a row must have.

    Attributes:
        prompt: name of the prompt's field; ``a.b`` for a nested one.
        label: name of the label's field, in the same form; None without labels.
        image: name of the images' field, which is optional.
        chat: whether a prompt may also be a list of messages for a chat template.
        template: text with ``{}`` for the prompt; None for the prompt alone.
        label_fault: label -> error text, or None if the label is valid.
    """

    prompt: str = "input"
    label: str | None = None
    image: str = "images"
    chat: bool = False
    template: str | None = None
    label_fault: Callable[[Any], str | None] = lambda label: None

    def text(self, prompt: str) -> str:
        """The prompt inside the template, as the model gets it."""
        return prompt if self.template is None else self.template.format(prompt)

    def flat(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row that a run reads, at the top level.

        The label is the text of the file, because reward functions compare texts.

        Raises:
            ValueError: a label of a type without a text.
        """
        flat = {self.prompt: value_of(row, self.prompt), self.image: row.get(self.image)}
        if row.get(DATASOURCE) is not None:
            flat[DATASOURCE] = str(row[DATASOURCE])
        if self.label is not None:
            flat[self.label] = label_of(value_of(row, self.label))
        return flat


def rows_of(name: str, split: str, fields: PromptSchema) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) of every row of a file, a folder or a data set of a hub.

    Args:
        name: as in a recipe; ``NAME@FOLDER`` is a folder of a data set.
        split: its part; a file has one part.

    Raises:
        DataError: it cannot be read, or has no rows.
    """
    given, _, folder = (part.strip() for part in name.partition("@"))
    path = Path(given)
    if path.suffix in SUFFIXES:
        numbered = _numbered(path, fields)
    else:
        numbered = enumerate(table_rows(_loaded(given, folder, split, fields), fields), start=1)
    empty = True
    for number, row in numbered:
        empty = False
        yield f"{given}: row {number}", row
    if empty:
        raise DataError(f"{given}: no rows, expected at least one prompt")


def _numbered(path: Path, fields: PromptSchema) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        batches = parquet_batches(path, lambda names: _columns(names, fields))
        yield from enumerate(_rows(batches, fields), start=1)
    elif path.suffix == ".arrow":
        yield from enumerate(_rows(_arrow_batches(path), fields), start=1)
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix == ".json" and _begins_with_a_list(path):
        yield from enumerate(_whole(path), start=1)
    else:
        yield from numbered_json_lines(path, skip_blank=True, parse_float=Number)


def _columns(present: list[str], fields: PromptSchema) -> list[str]:
    """The columns to read; all if one is missing, so that the error can list them."""
    wanted = {
        name if name in present else name.partition(".")[0]
        for name in filter(None, [fields.prompt, fields.label])
    }
    optional = {fields.image, DATASOURCE}
    return [*({*wanted, *optional} & {*present})] if wanted <= {*present} else present


def table_rows(data: Any, fields: PromptSchema) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set of `datasets`, without its decoding."""
    columns = _columns(data.column_names, fields)
    for batch in data.select_columns(columns).with_format("arrow").iter(1000):
        yield from _rows(batch.to_batches(), fields)


def _rows(batches: Iterable[Any], fields: PromptSchema) -> Iterator[dict[str, Any]]:
    """Rows of Arrow. Half and single precision labels get the shortest text, 0.9 for 0.9."""
    import numpy as np
    from pyarrow import types

    for batch in batches:
        rows = batch.to_pylist()
        label = fields.label if fields.label in batch.schema.names else None
        kind = batch.schema.field(label).type if label else None
        if kind is not None and (types.is_float16(kind) or types.is_float32(kind)):
            narrow = np.float16 if types.is_float16(kind) else np.float32
            for row in rows:
                row[label] = None if row[label] is None else Number(str(narrow(row[label])))
        yield from rows


def _arrow_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:  # the form of `datasets`
                yield from pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                file = pa.ipc.open_file(source)
                yield from map(file.get_batch, range(file.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Arrow file: {single_line(error)}") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row:
                    raise DataError(
                        f"{path}: row {number}: more values than the header has names "
                        f"({truncate(row[None])}); put values that contain commas into quotes"
                    )
                yield number, {name: value or None for name, value in row.items()}
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV file in UTF-8: {single_line(error)}") from None


def _begins_with_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _whole(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text, parse_float=Number, parse_constant=refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {single_line(error)}") from None
    assert isinstance(rows, list)
    return rows


def _loaded(given: str, folder: str, split: str, fields: PromptSchema) -> Any:
    """The data set of a saved folder, a folder of files or an id of a hub."""
    import datasets

    is_folder = Path(given).is_dir()
    try:
        if is_folder and any((Path(given) / mark).is_file() for mark in _SAVED):
            data = datasets.load_from_disk(given)
        else:
            data = datasets.load_dataset(given, data_dir=folder or None)
    except Exception as error:  # many kinds, of this library and of what it reads with
        if not is_folder:
            raise
        raise DataError(f"{given}: cannot be read as a data set: {single_line(error)}") from None
    if not isinstance(data, datasets.Dataset):
        if split not in data:
            raise DataError(f"{given}: no split {split!r}, expected one of {', '.join(data)}")
        data = data[split]
    _refuse_guessed(given, data, fields)
    return data


#: Files by which `load_from_disk` knows a folder of one data set, and of several splits.
_SAVED = ("state.json", "dataset_dict.json")


def _refuse_guessed(given: str, data: Any, fields: PromptSchema) -> None:
    """Refuse labels whose type `datasets` guessed, so that their text may be another one."""
    builder, label = data.info.builder_name, fields.label
    if builder not in ("json", "csv") or label is None:
        return
    kind = _type_of(data.features.arrow_schema, label)
    if kind is not None and not _keeps_text(kind, builder):
        first = next((value_of(row, label) for row in table_rows(data, fields)), None)
        raise DataError(
            f"{given}: row 1: {label}: {truncate(first)}: `datasets` reads the labels of these "
            f"{builder.upper()} files as {kind}, and their text may be another; name the file "
            "itself, or write the labels as text"
        )


def _type_of(fields: Any, name: str) -> Any:
    """The type of a field, or of one inside another (``a.b``); None if it is missing."""
    names = [field.name for field in fields]
    if name in names:
        return fields.field(name).type
    outer, dot, inner = name.partition(".")
    is_struct = dot and outer in names and hasattr(fields.field(outer).type, "fields")
    return _type_of(fields.field(outer).type, inner) if is_struct else None


def _keeps_text(kind: Any, builder: str) -> bool:
    from pyarrow import types

    if types.is_nested(kind):
        return all(_keeps_text(field.type, builder) for field in kind.fields)
    exact = types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)
    return exact or (builder == "json" and (types.is_int64(kind) or types.is_boolean(kind)))
