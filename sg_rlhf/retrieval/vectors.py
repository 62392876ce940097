"""Vectors on disk: a flat faiss index that several processes write in any order, piece by piece.

    faiss's header | rows x dimension numbers, fp32 or fp16, little endian

The header is what faiss writes for an empty index, with the number of vectors put in, so the file
is an `IndexFlatIP` (fp32) or an `IndexScalarQuantizer` (fp16) as soon as all rows are there, and no
process ever holds more than the rows that it writes. What is read comes back as float32.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.common.index_sizes import Precision

DTYPES: dict[str, Any] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2")}

#: Where faiss's header of any index has the number of vectors: after the type's four letters and
#: the dimension, int64.
NTOTAL_AT = 8


def empty_index(precision: Precision, dimension: int) -> Any:
    """The faiss index that a file of vectors is."""
    metric = faiss.METRIC_INNER_PRODUCT
    if precision == "fp32":
        return faiss.IndexFlatIP(dimension)
    return faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16, metric)


def with_rows(serialized: bytes, rows: int) -> bytearray:
    """The bytes of an empty index, `rows` put in where faiss keeps how many there are."""
    made = bytearray(serialized)
    made[NTOTAL_AT : NTOTAL_AT + 8] = struct.pack("<q", rows)
    return made


def header(index: Any, rows: int) -> bytes:
    """What stands before the codes of a flat or scalar-quantized `index` of `rows` vectors."""
    made = with_rows(bytes(faiss.serialize_index(index)), rows)
    size = rows * index.code_size
    # The last number is that of the codes: floats of a flat index, bytes of any other.
    flat = isinstance(index, faiss.IndexFlat)
    made[-8:] = struct.pack("<q", size // 4 if flat else size)
    return bytes(made)


class VectorFile:
    """`rows` vectors of `dimension` numbers; opened for reading and writing."""

    def __init__(self, path: Path, precision: Precision, rows: int, dimension: int) -> None:
        self.path, self.rows, self.dimension = path, rows, dimension
        self.dtype = DTYPES[precision]
        self._header = header(empty_index(precision, dimension), rows)
        self._row_bytes = dimension * self.dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._header) + self.rows * self._row_bytes

    def create(self) -> None:
        """Write the header and give the file its size; rows that are not written take no room."""
        with disk_full_context(self.path):
            os.pwrite(self._file, self._header, 0)
            os.ftruncate(self._file, self.size)

    def write(self, first: int, vectors: np.ndarray) -> None:
        """Write [n, dimension] from row `first` on; they are on the disk when this returns."""
        data = np.ascontiguousarray(vectors, self.dtype).data.cast("B")
        position = len(self._header) + first * self._row_bytes
        with disk_full_context(self.path):
            while data:
                written = os.pwrite(self._file, data, position)
                data, position = data[written:], position + written
            os.fdatasync(self._file)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`, float32 [n, dimension], in memory of their own.

        Raises:
            ValueError: the file is shorter than it should be.
        """
        raw = np.empty((stop - start, self.dimension), self.dtype)
        data = raw.data.cast("B")
        position = len(self._header) + start * self._row_bytes
        while data:
            count = os.preadv(self._file, [data], position)
            if not count:
                raise ValueError(f"{self.path}: ends after {position} of {self.size} bytes")
            data, position = data[count:], position + count
        return raw.astype(np.float32, copy=False)

    def blocks(self, size: int, first: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Pieces of at most `size` rows from `first` on: where each starts, and its vectors."""
        for start in range(first, self.rows, size):
            yield start, self.read(start, min(start + size, self.rows))

    def draw(self, count: int) -> np.ndarray:
        """`count` rows, or all, int64 in their order: one of each of `count` equal stretches."""
        if count >= self.rows:
            return np.arange(self.rows)
        starts = np.arange(count + 1) * self.rows // count
        return np.random.default_rng(0).integers(starts[:-1], starts[1:])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of these rows, float32 [n, dimension]."""
        found = np.empty((len(rows), self.dimension), np.float32)
        # Rows that follow one another are one read.
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for first, stop in pairwise(cuts):
            found[first:stop] = self.read(int(rows[first]), int(rows[stop - 1]) + 1)
        return found

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
