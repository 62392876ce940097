"""A corpus of passages on disk: JSON lines that are read by offset, never as a whole.

The format is Search-R1's: `{"id": "0", "contents": "\\"Title\\"\\ntext"}`, one passage a line. A
passage is addressed by its row (0, 1, ...); 8 bytes a row are kept in memory or mapped from a file,
the text stays on disk.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
from tqdm import tqdm

from sg_rlhf.common.atomic_io import disk_full_context


class Document(TypedDict):
    """A passage as the HTTP contract has it."""

    id: str
    contents: str


def scan(path: Path, *, check: bool = True) -> tuple[np.ndarray, str]:
    """Read a corpus once: where its lines start, and its SHA-256.

    Args:
        check: parse every line (10 microseconds each); False finds offsets alone, and no SHA-256.

    Returns:
        rows + 1 offsets in bytes, the last one the file's size; the SHA-256 or "".

    Raises:
        ValueError: naming the file, the line and the field of the first bad passage.
    """
    offsets = array("q", [0])
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(
            total=size, unit="B", unit_scale=True, desc=f"reading {path.name}", disable=None
        ) as bar,
    ):
        for line in file:
            if check:
                parse(line, path, len(offsets))
                digest.update(line)
            offsets.append(offsets[-1] + len(line))
            if len(offsets) % 10_000 == 0:
                bar.update(offsets[-1] - bar.n)
    if len(offsets) == 1:
        raise ValueError(f"{path}: no passages, expected one JSON object per line")
    return np.frombuffer(offsets, dtype=np.int64), digest.hexdigest() if check else ""


def parse(line: bytes, path: Path, number: int) -> Document:
    """One line, number 1 or more, as a passage; other fields than `id` and `contents` are left out.

    Raises:
        ValueError: naming file, line and field.
    """
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
    """Passages by row, from a memory-mapped file; `offsets` are `scan`'s."""

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


def save_offsets(path: Path, offsets: np.ndarray) -> None:
    """Write offsets for `load_offsets`."""
    with disk_full_context(path), path.open("wb") as file:
        np.save(file, offsets)
        os.fsync(file.fileno())


def load_offsets(path: Path, rows: int) -> np.ndarray:
    """Offsets of `rows` passages mapped from a file: no memory of their own.

    Raises:
        ValueError: if the file holds no such offsets.
    """
    try:
        offsets = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not passages' offsets ({error})") from None
    if offsets.dtype != np.int64 or offsets.shape != (rows + 1,):
        raise ValueError(
            f"{path}: {offsets.dtype} {list(offsets.shape)}, expected int64 [passages + 1] for "
            f"{rows:,} passages"
        )
    return offsets
