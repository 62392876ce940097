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
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from tqdm import tqdm

from sg_rlhf.common.atomic_io import disk_full_context


class Document(TypedDict):
    """A passage as the HTTP contract has it."""

    id: str
    contents: str


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a corpus file.

    `offsets` has rows + 1 entries: the byte where each line starts, then the file's size.
    """

    offsets: np.ndarray
    sha256: str


def scan(path: Path, *, check: bool = True) -> Scan:
    """Read a corpus once: where its lines start, its SHA-256, and whether every line is a passage.

    Args:
        check: parse every line (10 microseconds each); False finds offsets alone, and `sha256`
            stays empty.

    Raises:
        ValueError: naming the file, the line and the field of the first bad passage, or both lines
            of the first id that comes twice.
    """
    offsets = array("q")
    ids = array("q")
    digest = hashlib.sha256()
    position = 0
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(
            total=size, unit="B", unit_scale=True, desc=f"reading {path.name}", disable=None
        ) as bar,
    ):
        for line in file:
            offsets.append(position)
            if check:
                ids.append(hash(parse(line, path, len(offsets))["id"]))
                digest.update(line)
            position += len(line)
            if len(offsets) % 10_000 == 0:
                bar.update(position - bar.n)
        bar.update(position - bar.n)
    if not offsets:
        raise ValueError(f"{path}: no passages, expected one JSON object per line")
    offsets.append(position)
    if check:
        _check_ids(path, ids)
    return Scan(np.frombuffer(offsets, dtype=np.int64), digest.hexdigest() if check else "")


def _check_ids(path: Path, ids: array[int]) -> None:
    """Refuse two equal ids; `ids` are their hashes, so lines with equal ones are compared."""
    hashes, counts = np.unique(np.frombuffer(ids, np.int64), return_counts=True)
    twice = set(hashes[counts > 1].tolist())
    if not twice:
        return
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if ids[number - 1] in twice:
                name = parse(line, path, number)["id"]
                if name in lines:
                    raise ValueError(
                        f"{path}, line {number}, field id: {name[:60]!r}, which line "
                        f"{lines[name]} has too; expected another for each passage"
                    )
                lines[name] = number


def parse(line: bytes, path: Path, number: int) -> Document:
    """One line as a passage; other fields than `id` and `contents` are left out.

    Raises:
        ValueError: naming `path`, the line's `number` (from 1) and the field.
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
    """Passages by row, from a memory-mapped file.

    Args:
        path: the JSONL file.
        offsets: from `scan`, in memory or mapped; rows + 1 int64.
    """

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
    """Write offsets so that `load_offsets` maps them."""
    with disk_full_context(path), path.open("wb") as file:
        np.save(file, offsets)
        os.fsync(file.fileno())


def load_offsets(path: Path, rows: int | None = None) -> np.ndarray:
    """Offsets mapped from a file: no memory of their own.

    Args:
        rows: how many passages they are of, if that is known.

    Raises:
        ValueError: if the file holds no such offsets.
    """
    try:
        offsets = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not passages' offsets ({error})") from None
    if offsets.dtype != np.int64 or offsets.ndim != 1 or rows not in (None, len(offsets) - 1):
        raise ValueError(
            f"{path}: {offsets.dtype} {list(offsets.shape)}, expected int64 [passages + 1]"
            + ("" if rows is None else f" for {rows:,} passages")
        )
    return offsets
