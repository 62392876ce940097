"""Validate the rows of a run's prompt files one by one.

OpenRLHF does not check rows: a missing field is a KeyError in a worker, the beginning of a too long
prompt is cut off, and the same prompt with two labels is rewarded for both. Here each of these is a
`DataError` with the row and the remedy.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import single_line, truncate
from sg_rlhf.data_io.records import DataError, numbered_json_lines, parquet_rows

#: Suffixes that upstream reads. An Arrow file is a cache of `datasets` and is not checked.
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
#: Field names of TRL, verl and OpenRLHF, for the message about a missing field.
COMMON_PROMPTS = ("prompt", "messages", "problem", "question", "instruction", "query", "input")
COMMON_LABELS = (
    "reward_model.ground_truth", "ground_truth", "answer", "solution", "label", "target",
)  # fmt: skip
#: Minimum tokens left for a response if `rollout.max_new_tokens` is not set.
LEAST_RESPONSE = 16


def max_prompt_tokens(max_len: int, max_new_tokens: int | None) -> int:
    """Maximum tokens of a prompt: `data.max_len` includes the prompt and its response."""
    return max_len - (max_new_tokens or LEAST_RESPONSE)


def too_long(tokens: int, rows: int, max_len: int, max_new_tokens: int | None) -> str:
    """The error text for a prompt that leaves too few tokens for its response."""
    room = max_prompt_tokens(max_len, max_new_tokens)
    if max_new_tokens is None:
        response = f"{LEAST_RESPONSE} tokens, the least where rollout.max_new_tokens is not set"
        other = "set rollout.max_new_tokens"
    else:
        response, other = f"{max_new_tokens} tokens (max_new_tokens)", "lower max_new_tokens"
    return (
        f"the prompt has {tokens} tokens, and data.max_len={max_len} leaves {room} next to a "
        f"response of {response}; {rows} such rows; raise data.max_len, {other}, or leave such "
        "rows out"
    )


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row, or None if it is missing.

    ``a.b`` is the field b inside a, unless the row has a field with the name ``a.b``.
    """
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    value = row.get(outer)
    return value_of(value, inner) if dot and isinstance(value, Mapping) else None


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
        """The row with nested prompt and label copied to the top level.

        A numeric label becomes text, because reward functions compare texts.
        """
        flat = {**row, self.prompt: value_of(row, self.prompt)}
        if self.label is not None:
            label = value_of(row, self.label)
            flat[self.label] = str(label) if isinstance(label, (int, float)) else label
        return flat


@dataclass
class PromptIndex:
    """Index of the rows read so far, from one or more files. Locations are "FILE: row N".

    Attributes:
        prompts: digest of each distinct prompt -> (location, digest of its label).
        rows: number of rows.
        repeated: number of rows that repeat an earlier prompt and label.
        first_repeated: locations of the earlier row and the first that repeats it.
        keep: count a prompt that has another label, instead of raising an error.
        contradicting: number of rows whose prompt occurred with another label.
        first_contradicting: locations of the earlier row and the first that contradicts it.
        numbers: number of numeric labels.
        first_number: location and text of the first of them.
    """

    prompts: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    rows: int = 0
    repeated: int = 0
    first_repeated: tuple[str, str] = ("", "")
    keep: bool = False
    contradicting: int = 0
    first_contradicting: tuple[str, str] = ("", "")
    numbers: int = 0
    first_number: tuple[str, str] = ("", "")

    def remarks(self) -> list[str]:
        """One line each about repeated rows, contradicting labels and numeric labels."""
        lines = []
        if self.repeated:
            first, second = self.first_repeated
            lines.append(
                f"{self.repeated} of {self.rows} rows repeat an earlier one (first: {second} "
                f"repeats {first}): such prompts are trained on more often"
            )
        if self.contradicting:
            first, second = self.first_contradicting
            lines.append(
                f"{self.contradicting} of {self.rows} rows have an earlier prompt with another "
                f"label (first: {second}, of {first}): no response is right by both"
            )
        if self.numbers:
            place, text = self.first_number
            lines.append(
                f"{self.numbers} of {self.rows} labels are numbers: the reward function gets them "
                f"as text (first: {place}: {text!r})"
            )
        return lines

    def add_number(self, place: str, text: str) -> None:
        """Count a numeric label."""
        self.numbers += 1
        self.first_number = self.first_number if self.first_number[0] else (place, text)

    def add(self, prompt: Any, label: Any, images: Any, place: str) -> None:
        """Add one row.

        Raises:
            DataError: an earlier row has the same prompt with another label.
        """
        self.rows += 1
        key, answer = _digest(prompt, images), _digest(label)
        known, known_answer = self.prompts.setdefault(key, (place, answer))
        if known == place:
            return
        if known_answer != answer and self.keep:
            self.contradicting += 1
            self.first_contradicting = (
                self.first_contradicting if self.first_contradicting[0] else (known, place)
            )
            return
        if known_answer != answer:
            raise DataError(
                f"{place}: the prompt of {known} with another label, {truncate(label, 60)}: "
                "a response cannot be right by both; keep one of the two rows, or "
                "sg.contradicting_labels=keep"
            )
        self.repeated += 1
        if not self.first_repeated[0]:
            self.first_repeated = known, place


def _digest(*values: Any) -> bytes:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def checked(
    rows: Iterable[tuple[str, Any]], fields: PromptSchema, seen: PromptIndex
) -> Iterator[tuple[str, str | None]]:
    """Check rows; yield (location, prompt as text, or None for a list of messages) of each.

    Args:
        rows: (location, row) of each row.
        fields: what a row must have.
        seen: the index that the rows are added to.

    Raises:
        DataError: one line with the row, the field, its value and what was expected.
    """
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{place}: {truncate(row)}, expected an object with {fields.prompt!r}")
        flat = fields.flat(row)
        prompt = flat[fields.prompt]
        fault = _prompt_fault(prompt, fields)
        if fault is not None:
            raise DataError(
                f"{place}: {fields.prompt}: {fault}{_has(row) if prompt is None else ''}"
            )
        label = None
        if fields.label is not None:
            label = flat[fields.label]
            missing = label is None or (isinstance(label, (str, list, dict)) and not label)
            blank = isinstance(label, str) and not label.strip()
            if missing or blank:
                raise DataError(
                    f"{place}: {fields.label}: missing or empty, expected what the reward compares "
                    f"with{_has(row) if label is None else ''}"
                )
            fault = fields.label_fault(label)
            if fault is not None:
                raise DataError(f"{place}: {fields.label}: {fault}")
            if isinstance(value_of(row, fields.label), (int, float)):
                seen.add_number(place, label)
        seen.add(prompt, label, row.get(fields.image), place)
        yield place, fields.text(prompt) if isinstance(prompt, str) else None


def _has(row: Mapping[str, Any]) -> str:
    """The row's fields, and the settings that fit if its form is a common one."""
    prompt = next((name for name in COMMON_PROMPTS if value_of(row, name) is not None), None)
    label = next((name for name in COMMON_LABELS if value_of(row, name) is not None), None)
    has = f"; the row has {truncate([*row])}"
    if prompt is None:
        return has
    settings = [f"data.input_key={prompt}"]
    if label is not None:
        settings.append(f"data.label_key={label}")
    if isinstance(value_of(row, prompt), list):
        settings.append("data.apply_chat_template=true")
    return f"{has}: set {' '.join(settings)}"


def _prompt_fault(prompt: Any, fields: PromptSchema) -> str | None:
    if prompt is None:
        return "missing, expected the prompt's text"
    if fields.chat and isinstance(prompt, list):
        fine = prompt and all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in prompt)
        return None if fine else f"{truncate(prompt)}, expected messages with role and content"
    if isinstance(prompt, list):
        return f"{truncate(prompt)}, expected text, or messages with data.apply_chat_template=true"
    if not isinstance(prompt, str):
        return f"{truncate(prompt)}, expected text"
    if not prompt.strip():
        return "empty, expected the prompt's text"
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        return f"contains half a character (at {error.start}), expected text in UTF-8"
    return None


def rows_of(path: Path, fields: PromptSchema) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) of every row of a file.

    Raises:
        DataError: the file cannot be read in the format of its suffix, or has no rows.
    """
    empty = True
    for number, row in _numbered(path, fields):
        empty = False
        yield f"{path}: row {number}", row
    if empty:
        raise DataError(f"{path}: no rows, expected at least one prompt")


def _numbered(path: Path, fields: PromptSchema) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path, lambda names: _columns(names, fields)), start=1)
    elif path.suffix == ".csv":
        yield from _csv_rows(path, fields)
    elif path.suffix == ".json" and _begins_with_a_list(path):
        yield from enumerate(_whole(path), start=1)
    else:
        yield from numbered_json_lines(path, skip_blank=True)


def _columns(present: list[str], fields: PromptSchema) -> list[str]:
    """The columns to read; all if one is missing, so that the error can list them."""
    wanted = {
        name if name in present else name.partition(".")[0]
        for name in filter(None, [fields.prompt, fields.label])
    }
    return [*({*wanted, fields.image} & {*present})] if wanted <= {*present} else present


def _csv_rows(path: Path, fields: PromptSchema) -> Iterator[tuple[int, Any]]:
    """The rows as text. Training reads them with `datasets`, which takes digits as a number."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                label = row.get(fields.label or "")
                if label and (read := _as_number(label)) is not None and read != label:
                    raise DataError(
                        f"{path}: row {number}: {fields.label}: {label!r} is read from a CSV file "
                        f"as the number {read}; write the rows as JSON lines"
                    )
                yield number, {k: v or None for k, v in row.items() if k is not None}
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV file in UTF-8: {single_line(error)}") from None


def _as_number(text: str) -> str | None:
    """The number that a text is, as Python prints it; None for other texts."""
    try:
        return str(int(text) if text.strip("+-").isdecimal() else float(text))
    except ValueError:
        return None


def _begins_with_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip()[:1] == b"["
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _whole(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {single_line(error)}") from None
    assert isinstance(rows, list)
    return rows
