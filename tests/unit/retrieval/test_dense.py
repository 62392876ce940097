"""Dense indexes, ours and plain faiss files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from sg_rlhf.retrieval import dense
from sg_rlhf.retrieval.dense import DenseBackend, nearest
from sg_rlhf.retrieval.dense_build import new_index

# -- faiss: exact search is exact, approximate search nearly, and ties and batches change nothing --


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


def make(tmp_path: Path, factory: str, vectors: np.ndarray, queries: np.ndarray) -> DenseBackend:
    index = new_index(factory, DIMENSION)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    return DenseBackend(tmp_path / "index.faiss", Vectors(queries))


def exact(vectors: np.ndarray, queries: np.ndarray, topk: int) -> np.ndarray:
    scores = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    return np.argsort(-scores, axis=1, kind="stable")[:, :topk]


def names(count: int) -> list[str]:
    return [str(row) for row in range(count)]


def test_flat_is_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 3000), unit(rng, 100)
    found = make(tmp_path, "Flat", vectors, queries).search(names(100), 10)
    expected = exact(vectors, queries, 10)
    for query, (rows, scores) in enumerate(found):
        assert rows.tolist() == expected[query].tolist()
        assert scores == pytest.approx(vectors[rows] @ queries[query], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block", [1, 100, 4096])
def test_flat_search_is_exact_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int
) -> None:
    monkeypatch.setattr(dense, "BLOCK", block)
    rng = np.random.default_rng(8)
    vectors, queries = torch.from_numpy(unit(rng, 301)).to(dtype), unit(rng, 20)
    rows, found = nearest(vectors, queries, 10)
    assert rows.tolist() == exact(vectors.numpy(), queries, 10).tolist()
    assert np.array_equal(found, vectors.float().numpy()[rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_a_cpu_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    vectors, queries = unit(rng, 3000), unit(rng, 300)
    on_cpu = make(tmp_path, "SQfp16", vectors, queries)
    on_gpu = DenseBackend(tmp_path / "index.faiss", Vectors(queries), device="cuda")
    pairs = zip(on_cpu.search(names(300), 10), on_gpu.search(names(300), 10), strict=True)
    for (rows, scores), (other_rows, other_scores) in pairs:
        assert np.array_equal(rows, other_rows)
        assert np.array_equal(scores, other_scores)


@pytest.mark.parametrize("device", ["cuda:99", "tpu"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    vectors = unit(np.random.default_rng(10), 100)
    make(tmp_path, "Flat", vectors, vectors)
    with pytest.raises(ValueError, match=f"--search-device {device}: "):
        DenseBackend(tmp_path / "index.faiss", Vectors(vectors), device=device)


@pytest.mark.parametrize(
    ("factory", "least"),
    [
        ("SQ8", 0.95),
        ("HNSW32", 0.95),
        ("IVF186,Flat", 0.94),
        ("IVF186,SQ8", 0.94),
        # Its training takes 20 seconds.
        pytest.param("PQ12", 0.4, marks=pytest.mark.full),
    ],
)
def test_approximate_search_finds_nearly_all(tmp_path: Path, factory: str, least: float) -> None:
    """Recall@10 against exact search, on as many passages as the real small corpus has."""
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 7283), unit(rng, 200)
    found = make(tmp_path, factory, vectors, queries).search(names(200), 10)
    expected = exact(vectors, queries, 10)
    shared = [len(set(rows) & set(expected[i])) for i, (rows, _) in enumerate(found)]
    assert np.mean(shared) / 10 > least


@pytest.mark.parametrize("factory", ["Flat", "SQfp16", "SQ8", "HNSW32", "IVF16,Flat", "IVF16,SQ8"])
def test_alone_or_in_a_batch_bit_for_bit(tmp_path: Path, factory: str) -> None:
    rng = np.random.default_rng(2)
    backend = make(tmp_path, factory, unit(rng, 2000), unit(rng, 70))
    together = backend.search(names(70), 5)
    for query, (rows, scores) in zip(names(70), together, strict=True):
        [(rows_alone, scores_alone)] = backend.search([query], 5)
        assert np.array_equal(rows, rows_alone)
        assert np.array_equal(scores, scores_alone)


def test_ties_go_to_the_lower_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    vectors = unit(rng, 1000)
    same = rng.choice(1000, size=dense.MARGIN, replace=False)
    vectors[same] = vectors[same[0]]
    backend = make(tmp_path, "Flat", vectors, vectors[same[:1]])
    for queries in (["0"], ["0"] * 30):
        for rows, scores in backend.search(queries, 4):
            assert rows.tolist() == sorted(same.tolist())[:4]
            assert len(set(scores.tolist())) == 1


def test_more_asked_than_there_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    vectors = unit(rng, 7)
    [(rows, _)] = make(tmp_path, "Flat", vectors, vectors[:1]).search(["0"], 50)
    assert sorted(rows.tolist()) == list(range(7))
    assert rows[0] == 0


def test_the_index_is_mapped_not_read(tmp_path: Path) -> None:
    """The file is part of the address space, so its pages are the kernel's to drop."""
    rng = np.random.default_rng(6)
    backend = make(tmp_path, "Flat", unit(rng, 3000), unit(rng, 1))
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


# -- Files that others made: opened with search parameters that find things, or refused in a line --


METRIC = faiss.METRIC_INNER_PRODUCT
ROWS = 4000


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return unit(np.random.default_rng(0), ROWS)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return unit(np.random.default_rng(1), 100)


def saved(path: Path, factory: str, vectors: np.ndarray) -> Path:
    """An index as the reference's script makes it: by faiss's factory, parameters left alone."""
    index = faiss.index_factory(DIMENSION, factory, METRIC)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, os.fspath(path))
    return path


def share_found(backend: DenseBackend, vectors: np.ndarray, queries: np.ndarray) -> float:
    found = backend.search(names(len(queries)), 3)
    expected = exact(vectors, queries, 3)
    return float(
        np.mean([len(set(rows) & set(expected[i])) / 3 for i, (rows, _) in enumerate(found)])
    )


@pytest.mark.parametrize(
    ("factory", "used"),
    [
        ("Flat", {}),
        ("HNSW64", {"efSearch": 128}),
        ("IVF64,Flat", {"nprobe": 16}),
        # Its training takes 20 seconds.
        pytest.param("OPQ8,IVF64,PQ8", {"nprobe": 16}, marks=pytest.mark.full),
    ],
)
def test_low_defaults_of_faiss_are_raised(
    tmp_path: Path,
    vectors: np.ndarray,
    queries: np.ndarray,
    factory: str,
    used: dict[str, int],
) -> None:
    backend = DenseBackend(saved(tmp_path / "e5.index", factory, vectors), Vectors(queries))
    assert backend.parameters == used
    if "PQ" not in factory:
        assert share_found(backend, vectors, queries) > 0.93


def test_what_is_asked_for_is_used(
    tmp_path: Path, vectors: np.ndarray, queries: np.ndarray
) -> None:
    path = saved(tmp_path / "e5.index", "IVF64,Flat", vectors)
    few, all_ = (DenseBackend(path, Vectors(queries), {"nprobe": n}) for n in (1, 64))
    assert share_found(few, vectors, queries) < 0.9
    assert share_found(all_, vectors, queries) == 1.0


def test_a_file_that_says_more_keeps_it(tmp_path: Path, vectors: np.ndarray) -> None:
    for factory, name, value in (("HNSW16", "efSearch", 300), ("IVF64,Flat", "nprobe", 5)):
        index = faiss.index_factory(DIMENSION, factory, METRIC)
        index.train(vectors)
        index.add(vectors)
        setattr(index.hnsw if name == "efSearch" else index, name, value)
        faiss.write_index(index, os.fspath(tmp_path / "index"))
        backend = DenseBackend(tmp_path / "index", Vectors(vectors[:1]))
        assert backend.parameters == {name: value}


@pytest.mark.parametrize(
    ("factory", "given", "message"),
    [
        ("Flat", {"nprobe": 3}, "--search nprobe=3: e5.index has no search parameters"),
        ("HNSW16", {"nprobe": 3}, "--search nprobe=3: e5.index has efSearch"),
        ("IVF64,Flat", {"efSearch": 3}, "--search efSearch=3: e5.index has nprobe"),
    ],
)
def test_parameters_that_it_has_not(
    tmp_path: Path, vectors: np.ndarray, factory: str, given: dict[str, int], message: str
) -> None:
    path = saved(tmp_path / "e5.index", factory, vectors)
    with pytest.raises(ValueError) as error:
        DenseBackend(path, Vectors(vectors[:1]), given)
    assert str(error.value) == message


def test_ids_of_their_own(tmp_path: Path, vectors: np.ndarray) -> None:
    index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(DIMENSION))
    index.add_with_ids(vectors, np.arange(ROWS) + 7)
    faiss.write_index(index, os.fspath(tmp_path / "index"))
    with pytest.raises(ValueError, match="ids of their own; expected the passages' rows"):
        DenseBackend(tmp_path / "index", Vectors(vectors[:1]))


def test_no_vectors(tmp_path: Path, vectors: np.ndarray) -> None:
    faiss.write_index(faiss.IndexFlatIP(DIMENSION), os.fspath(tmp_path / "index"))
    with pytest.raises(ValueError, match="no vectors in it"):
        DenseBackend(tmp_path / "index", Vectors(vectors[:1]))
