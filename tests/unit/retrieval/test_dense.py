"""faiss: exact search is exact, approximate search nearly, and ties and batches change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sg_rlhf.common import index_sizes
from sg_rlhf.retrieval import assemble, dense
from sg_rlhf.retrieval.dense import DenseBackend
from sg_rlhf.retrieval.vectors import VectorFile

DIMENSION = 48


class Vectors:
    """Stands where an encoder does when only the index is tested: a query is a row's number."""

    dimension = DIMENSION

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    def encode(self, texts: Sequence[str], kind: Any) -> np.ndarray:
        return self._vectors[[int(text) for text in texts]]


def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Clustered like the vectors of an encoder: topics with passages around them."""
    centres = rng.standard_normal((max(1, rows // 40), DIMENSION))
    vectors = centres[rng.integers(len(centres), size=rows)]
    vectors = vectors + 0.6 * rng.standard_normal((rows, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def make(tmp_path: Path, kind: str, vectors: np.ndarray, queries: np.ndarray) -> DenseBackend:
    made = index_sizes.spec(kind, len(vectors), DIMENSION, "fp32")
    file = VectorFile(tmp_path / "vectors.faiss", "fp32", len(vectors), DIMENSION)
    file.create()
    file.write(0, vectors)
    assemble.assemble(made, file, tmp_path / "index.faiss", progress=False)
    file.close()
    return DenseBackend(tmp_path / "index.faiss", Vectors(queries), made.search)


def exact(vectors: np.ndarray, queries: np.ndarray, topk: int) -> np.ndarray:
    scores = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    return np.argsort(-scores, axis=1, kind="stable")[:, :topk]


def names(count: int) -> list[str]:
    return [str(row) for row in range(count)]


def test_flat_is_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 3000), unit(rng, 100)
    found = make(tmp_path, "flat", vectors, queries).search(names(100), 10)
    expected = exact(vectors, queries, 10)
    for query, (rows, scores) in enumerate(found):
        assert rows.tolist() == expected[query].tolist()
        assert scores == pytest.approx(vectors[rows] @ queries[query], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "least"),
    [("sq8", 0.95), ("hnsw", 0.95), ("ivf", 0.95), ("ivfsq8", 0.95), ("ivfpq", 0.4)],
)
def test_approximate_search_finds_nearly_all(tmp_path: Path, kind: str, least: float) -> None:
    """Recall@10 against exact search, on as many passages as the real small corpus has."""
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 7283), unit(rng, 200)
    found = make(tmp_path, kind, vectors, queries).search(names(200), 10)
    expected = exact(vectors, queries, 10)
    shared = [len(set(rows) & set(expected[i])) for i, (rows, _) in enumerate(found)]
    assert np.mean(shared) / 10 > least


@pytest.mark.parametrize("kind", index_sizes.KINDS)
def test_alone_or_in_a_batch_bit_for_bit(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(2)
    backend = make(tmp_path, kind, unit(rng, 2000), unit(rng, 70))
    together = backend.search(names(70), 5)
    for query, (rows, scores) in zip(names(70), together, strict=True):
        [(rows_alone, scores_alone)] = backend.search([query], 5)
        assert np.array_equal(rows, rows_alone)
        assert np.array_equal(scores, scores_alone)


@pytest.mark.parametrize("equal", [5, dense.MARGIN * 10])
def test_ties_go_to_the_lower_row(tmp_path: Path, equal: int) -> None:
    """Also where more passages tie than are fetched at first."""
    rng = np.random.default_rng(3)
    vectors = unit(rng, 1000)
    same = rng.choice(1000, size=equal, replace=False)
    vectors[same] = vectors[same[0]]
    backend = make(tmp_path, "flat", vectors, vectors[same[:1]])
    for queries in (["0"], ["0"] * 30):
        for rows, scores in backend.search(queries, 4):
            assert rows.tolist() == sorted(same.tolist())[:4]
            assert len(set(scores.tolist())) == 1


def test_more_asked_than_there_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    vectors = unit(rng, 7)
    [(rows, _)] = make(tmp_path, "flat", vectors, vectors[:1]).search(["0"], 50)
    assert sorted(rows.tolist()) == list(range(7))
    assert rows[0] == 0


def test_ivf_with_too_few_passages_for_its_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    vectors = unit(rng, 20)
    [(rows, _)] = make(tmp_path, "ivf", vectors, vectors[:1]).search(["0"], 3)
    assert rows[0] == 0


def test_the_index_is_mapped_not_read(tmp_path: Path) -> None:
    """The file is part of the address space, so its pages are the kernel's to drop."""
    rng = np.random.default_rng(6)
    backend = make(tmp_path, "flat", unit(rng, 3000), unit(rng, 1))
    assert str(tmp_path / "index.faiss") in Path("/proc/self/maps").read_text()
    assert len(backend) == 3000


def test_other_files_are_refused(tmp_path: Path) -> None:
    vectors = Vectors(unit(np.random.default_rng(7), 1))
    (tmp_path / "nonsense").write_bytes(b"not an index at all" * 10)
    with pytest.raises(ValueError, match="nonsense: not a faiss index"):
        DenseBackend(tmp_path / "nonsense", vectors)
    for index, message in (
        (faiss.IndexFlatL2(DIMENSION), "not an inner-product index"),
        (faiss.IndexFlatIP(DIMENSION + 1), "vectors of 49 numbers, but the encoder makes 48"),
    ):
        faiss.write_index(index, str(tmp_path / "index"))
        with pytest.raises(ValueError, match=message):
            DenseBackend(tmp_path / "index", vectors)
