"""Validate the rows of a run's prompt files one by one.

OpenRLHF does not check rows: a missing field is a KeyError in a worker, the beginning of a too long
prompt is cut off, and the same prompt with two labels is rewarded for both. Here each of these is a
`DataError` with the row and the remedy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.prompt_rows import PromptSchema, is_number, rows_of, value_of
from sg_rlhf.data_io.records import DataError

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


@dataclass
class PromptIndex:
    """Index of the rows read so far, from one or more files. Locations are "FILE: row N".

    Attributes:
        prompts: digest of each distinct prompt -> (location, digest of its label).
        rows: number of rows.
        repeated: number of rows that repeat an earlier prompt and label.
        first_repeated: locations of the earlier row and the first that repeats it.
        contradicting: number of rows whose prompt occurred with another label.
        first_contradicting: locations of the earlier row and the first that contradicts it.
        numbers: number of numeric labels.
        first_number: location and text of the first of them.
    """

    prompts: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    rows: int = 0
    repeated: int = 0
    first_repeated: tuple[str, str] = ("", "")
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
        """Add one row."""
        self.rows += 1
        key, answer = _digest(prompt, images), _digest(label)
        known, known_answer = self.prompts.setdefault(key, (place, answer))
        if known == place:
            return
        if known_answer != answer:
            self.contradicting += 1
            self.first_contradicting = (
                self.first_contradicting if self.first_contradicting[0] else (known, place)
            )
            return
        self.repeated += 1
        if not self.first_repeated[0]:
            self.first_repeated = known, place


def _digest(*values: Any) -> bytes:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def read_prompts(
    name: str, split: str, fields: PromptSchema, seen: PromptIndex | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read and check prompts: (location, the fields that a run reads) of each row.

    Args:
        name: a file, a folder or an id of a hub, as in a recipe; `split` is its part.
        fields: what a row must have.
        seen: the index that the rows are added to.

    Raises:
        DataError: it cannot be read or has no rows; or one line with the row, the field, its value
            and what was expected.
    """
    return checked(rows_of(name, split, fields), fields, seen)


def checked(
    rows: Iterable[tuple[str, Any]], fields: PromptSchema, seen: PromptIndex | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check rows that were read; see :func:`read_prompts`.

    Args:
        rows: (location, row) of each row.

    Raises:
        DataError: one line with the row, the field, its value and what was expected.
    """
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{place}: {truncate(row)}, expected an object with {fields.prompt!r}")
        try:
            flat = fields.flat(row)
        except ValueError as error:
            raise DataError(f"{place}: {fields.label}: {error}") from None
        if flat[fields.image]:
            raise DataError(
                f"{place}: {fields.image}: images are not supported; take the field out, or name "
                "another in data.image_key"
            )
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
            if seen is not None and is_number(value_of(row, fields.label)):
                seen.add_number(place, label)
        if seen is not None:
            seen.add(prompt, label, flat[fields.image], place)
        yield place, flat


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
