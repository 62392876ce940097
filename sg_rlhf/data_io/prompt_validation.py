"""The rows that a run's prompts are read from, checked one by one.

OpenRLHF takes a row as it comes: a missing field is a KeyError inside a worker, a prompt that
leaves no room loses its beginning with a line in a log, and the same prompt with two answers is
rewarded for both. Here each is a `DataError` with the row and what to do.
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

#: What upstream reads by its suffix; an Arrow file is a cache of `datasets`, and is taken as it is.
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
#: Fields of common data sets (TRL, verl, OpenRLHF), for the message about a field that is missing.
COMMON_PROMPTS = ("prompt", "messages", "problem", "question", "instruction", "query", "input")
COMMON_LABELS = (
    "reward_model.ground_truth", "ground_truth", "answer", "solution", "label", "target",
)  # fmt: skip
#: Fewest tokens for a response where `rollout.max_new_tokens` is not set.
LEAST_RESPONSE = 16


def max_prompt_tokens(max_len: int, max_new_tokens: int | None) -> int:
    """Most tokens of a prompt: `data.max_len` holds the prompt and its response."""
    return max_len - (max_new_tokens or LEAST_RESPONSE)


def too_long(tokens: int, rows: int, max_len: int, max_new_tokens: int | None) -> str:
    """What is wrong with a prompt that leaves no room for its response, and what to do."""
    room = max_prompt_tokens(max_len, max_new_tokens)
    if max_new_tokens is None:
        response = f"{LEAST_RESPONSE} tokens, the least where rollout.max_new_tokens is not set"
        other = "set rollout.max_new_tokens"
    else:
        response, other = f"{max_new_tokens} tokens (max_new_tokens)", "lower max_new_tokens"
    return (
        f"the prompt has {tokens} tokens, and data.max_len={max_len} leaves {room} beside a "
        f"response of {response}; {rows} such rows; raise data.max_len, {other}, or leave such "
        "rows out"
    )


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row; ``a.b`` is the field b of the object a, unless the row has a field ``a.b``.

    None where the row has no such field.
    """
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    found = row.get(outer)
    return value_of(found, inner) if dot and isinstance(found, Mapping) else None


@dataclass(frozen=True)
class PromptSchema:
    """What a row must hold.

    Attributes:
        prompt: the field of the prompt; ``a.b`` for one inside of another.
        label: the field of the label, in the same form; None: there is none.
        image: the field of its images, which need not be there.
        chat: a prompt may be a list of messages too, which a chat template makes text of.
        template: what the prompt is put into, with ``{}`` in its place; None: nothing.
        label_fault: label -> what is wrong with it, or None.
    """

    prompt: str = "input"
    label: str | None = None
    image: str = "images"
    chat: bool = False
    template: str | None = None
    label_fault: Callable[[Any], str | None] = lambda label: None

    def text(self, prompt: str) -> str:
        """The prompt as the model gets it."""
        return prompt if self.template is None else self.template.format(prompt)

    def flat(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with its prompt and its label under the names of their fields.

        A label that is a number becomes text, as a reward function compares texts.
        """
        found = {**row, self.prompt: value_of(row, self.prompt)}
        if self.label is not None:
            label = value_of(row, self.label)
            found[self.label] = str(label) if isinstance(label, (int, float)) else label
        return found


@dataclass
class PromptIndex:
    """What was seen of the rows so far, of one file or several.

    Attributes:
        prompts: digest of each different prompt -> (where it stands, digest of its label).
        rows: how many rows.
        repeated: how many of them repeat an earlier one, its label included.
        first_repeated: where the first of them and the earlier one stand.
        keep: take the same prompt with another label all the same, and count it.
        contradicting: how many rows have another label than the first with their prompt.
        first_contradicting: where the first of them and the earlier one stand.
        numbers: how many labels are numbers.
        first_number: where the first of them stands, and its text.
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
        """What a user should know of them, a line each."""
        found = []
        if self.repeated:
            first, second = self.first_repeated
            found.append(
                f"{self.repeated} of {self.rows} rows repeat an earlier one (first: {second} "
                f"repeats {first}): such prompts are trained on more often"
            )
        if self.contradicting:
            first, second = self.first_contradicting
            found.append(
                f"{self.contradicting} of {self.rows} rows have an earlier prompt with another "
                f"label (first: {second}, of {first}): no response is right by both"
            )
        if self.numbers:
            place, text = self.first_number
            found.append(
                f"{self.numbers} of {self.rows} labels are numbers: the reward function gets them "
                f"as text (first: {place}: {text!r})"
            )
        return found

    def take_number(self, place: str, text: str) -> None:
        """Note a label that is a number."""
        self.numbers += 1
        self.first_number = self.first_number if self.first_number[0] else (place, text)

    def take(self, prompt: Any, label: Any, images: Any, place: str) -> None:
        """Note one row.

        Raises:
            DataError: the same prompt stands elsewhere with another label.
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
    """(place, text) of each row once it is checked; None for a prompt of messages.

    Args:
        rows: (where it stands, row).

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
                seen.take_number(place, label)
        seen.take(prompt, label, row.get(fields.image), place)
        yield place, fields.text(prompt) if isinstance(prompt, str) else None


def _has(row: Mapping[str, Any]) -> str:
    """The fields of a row that lacks one, and the settings for it if its form is a common one."""
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
        return f"holds half a character (at {error.start}), expected text in UTF-8"
    return None


def rows_of(path: Path, fields: PromptSchema) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of every row of a file, read as upstream reads its kind.

    Raises:
        DataError: the file cannot be read as what its suffix says, or has no row.
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
        yield from _csv_rows(path)
    elif path.suffix == ".json" and _begins_with_a_list(path):
        yield from enumerate(_whole(path), start=1)
    else:
        yield from numbered_json_lines(path, skip_blank=True)


def _columns(present: list[str], fields: PromptSchema) -> list[str]:
    """The columns to read; all where one is missing, for the message about the first row."""
    wanted = {
        name if name in present else name.partition(".")[0]
        for name in filter(None, [fields.prompt, fields.label])
    }
    return [*({*wanted, fields.image} & {*present})] if wanted <= {*present} else present


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                yield number, {k: v or None for k, v in row.items() if k is not None}
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV file in UTF-8: {single_line(error)}") from None


def _begins_with_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip()[:1] == b"["
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _whole(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {single_line(error)}") from None
    assert isinstance(found, list)
    return found
