"""A corpus of passages on disk: JSON lines that are read by offset, never as a whole.

The format is Search-R1's: `{"id": "0", "contents": "\\"Title\\"\\ntext"}`, one passage a line. A
passage is addressed by its row (0, 1, ...); 8 bytes a row are kept in memory or mapped from a file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm
from typing_extensions import TypedDict


class Document(TypedDict):
    """A passage as the HTTP contract has it."""

    id: str
    contents: str


def scan(path: Path, *, check: bool = True) -> tuple[np.ndarray, str]:
    """Read a corpus once: the offsets of its lines, int64 [rows + 1], and its SHA-256.

    `check=False` finds the offsets alone, without the 10 microseconds per line of parsing.

    Raises:
        ValueError: names file, line and field of the first bad passage.
    """
    offsets = array("q", [0])
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for line in tqdm(file, desc=f"reading {path.name}", unit=" passages", disable=None):
            if check:
                parse(line, path, len(offsets))
                digest.update(line)
            offsets.append(offsets[-1] + len(line))
    if len(offsets) == 1:
        raise ValueError(f"{path}: no passages, expected one JSON object per line")
    return np.frombuffer(offsets, dtype=np.int64), digest.hexdigest() if check else ""


def parse(line: bytes, path: Path, number: int) -> Document:
    """One line, counted from 1, as a passage; ValueError names file, line and field."""
    place = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}), expected a passage") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {type(record).__name__}, expected an object")
    for field in ("id", "contents"):
        value = record.get(field)
        if not isinstance(value, str):
            found = repr(value)[:60] if field in record else "missing"
            raise ValueError(f"{place}, field {field}: {found}, expected a string")
        # Half of a UTF-16 pair is valid in JSON and in no encoding; tokenizers fail on it.
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError(f"{place}, field {field}: a lone surrogate, expected valid Unicode")
    return {"id": record["id"], "contents": record["contents"]}


class Corpus:
    """Passages by row, from a memory-mapped file; `offsets` as `scan` returns them."""

    def __init__(self, path: Path, offsets: np.ndarray) -> None:
        self.path = path
        self._offsets = offsets
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Lookups are scattered: without this each one reads 128 KiB ahead for nothing.
        self._map.madvise(mmap.MADV_RANDOM)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def document(self, row: int) -> Document:
        """The passage of a row, 0 to len - 1."""
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return parse(self._map[start:end], self.path, row + 1)

    def contents(self, rows: range) -> list[str]:
        """The texts of consecutive rows."""
        return [self.document(row)["contents"] for row in rows]


def iterate_contents(path: Path) -> Iterator[str]:
    """All texts in order, one in memory at a time."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield parse(line, path, number)["contents"]
