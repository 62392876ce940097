"""The file of vectors: faiss reads it, in whatever order it was written; a torn one is named."""

from __future__ import annotations

import os
from pathlib import Path

import faiss
import numpy as np
import pytest

from sg_rlhf.common.index_sizes import PRECISIONS, Precision
from sg_rlhf.retrieval.vectors import VectorFile

ROWS, DIMENSION = 500, 24


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, DIMENSION)).astype(np.float32)


def written(path: Path, precision: Precision, vectors: np.ndarray) -> VectorFile:
    """In three pieces, the last first, through two descriptors."""
    file = VectorFile(path, precision, ROWS, DIMENSION)
    file.create()
    other = VectorFile(path, precision, ROWS, DIMENSION)
    for start, stop in ((400, ROWS), (0, 150), (150, 400)):
        (other if start else file).write(start, vectors[start:stop])
    other.close()
    return file


@pytest.mark.parametrize("precision", PRECISIONS)
def test_faiss_reads_what_it_would_have_written(
    tmp_path: Path, vectors: np.ndarray, precision: Precision
) -> None:
    file = written(tmp_path / "vectors.faiss", precision, vectors)
    index = faiss.read_index(os.fspath(file.path))
    dtype = np.float32 if precision == "fp32" else np.float16
    assert np.array_equal(index.reconstruct_n(0, ROWS), vectors.astype(dtype).astype(np.float32))
    assert bytes(faiss.serialize_index(index)) == file.path.read_bytes()
    assert file.path.stat().st_size == file.size


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pieces_and_samples_are_the_vectors(
    tmp_path: Path, vectors: np.ndarray, precision: Precision
) -> None:
    file = written(tmp_path / "vectors.faiss", precision, vectors)
    stored = file.read(0, ROWS)
    assert stored.dtype == np.float32 and stored == pytest.approx(vectors, abs=2e-3)
    pieces = list(file.blocks(64, first=100))
    assert [start for start, _ in pieces] == list(range(100, ROWS, 64))
    assert np.array_equal(np.concatenate([part for _, part in pieces]), stored[100:])
    rows = file.draw(50)
    assert (rows // (ROWS // 50)).tolist() == list(range(50)), "one of each stretch"
    assert np.array_equal(file.draw(50), rows)
    assert np.array_equal(file.take(rows), stored[rows])
    mixed = np.array([7, 8, 9, 3, 4, 499, 0])
    assert np.array_equal(file.take(mixed), stored[mixed])
    assert np.array_equal(file.draw(ROWS + 1), np.arange(ROWS))


def test_a_file_that_ends_early_is_named(tmp_path: Path, vectors: np.ndarray) -> None:
    file = written(tmp_path / "vectors.faiss", "fp32", vectors)
    os.truncate(file.path, file.size - 10)
    with pytest.raises(ValueError, match=r"vectors\.faiss: ends after \d+ of \d+ bytes"):
        file.read(0, ROWS)


def test_rows_that_are_not_written_take_no_room(tmp_path: Path) -> None:
    """As large as wiki-18's: the disk is used as vectors come."""
    file = VectorFile(tmp_path / "vectors.faiss", "fp32", 21_015_324, 768)
    file.create()
    file.write(21_015_000, np.ones((1, 768), np.float32))
    status = file.path.stat()
    assert status.st_size == file.size > 64.5e9
    assert status.st_blocks * 512 < 2**20
    assert faiss.read_index(os.fspath(file.path), faiss.IO_FLAG_MMAP_IFC).ntotal == 21_015_324
