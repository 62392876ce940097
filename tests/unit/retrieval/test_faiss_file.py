"""Files that others made: opened with search parameters that find things, or refused in a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sg_rlhf.retrieval.dense import DenseBackend
from tests.unit.retrieval.test_dense import DIMENSION, Vectors, exact, names, unit

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
    ("factory", "used", "line"),
    [
        ("Flat", {}, None),
        ("HNSW64", {"efSearch": 128}, "efSearch 128, where the file says 16"),
        ("IVF64,Flat", {"nprobe": 16}, "nprobe 16, where the file says 1"),
        # Its training takes 20 seconds.
        pytest.param(
            "OPQ8,IVF64,PQ8",
            {"nprobe": 16},
            "nprobe 16, where the file says 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_defaults_of_faiss_are_raised_and_told(
    tmp_path: Path,
    vectors: np.ndarray,
    queries: np.ndarray,
    factory: str,
    used: dict[str, int],
    line: str | None,
) -> None:
    backend = DenseBackend(saved(tmp_path / "e5.index", factory, vectors), Vectors(queries))
    assert backend.parameters == used
    assert [line in said and "--search" in said for said in backend.adjusted] == [True] * len(used)
    if "PQ" not in factory:
        assert share_found(backend, vectors, queries) > 0.93


def test_what_is_asked_for_is_used(
    tmp_path: Path, vectors: np.ndarray, queries: np.ndarray
) -> None:
    path = saved(tmp_path / "e5.index", "IVF64,Flat", vectors)
    few, all_ = (DenseBackend(path, Vectors(queries), {"nprobe": n}) for n in (1, 64))
    assert few.adjusted == all_.adjusted == []
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
        assert (backend.parameters, backend.adjusted) == ({name: value}, [])


@pytest.mark.parametrize(
    ("factory", "given", "message"),
    [
        ("Flat", {"nprobe": 3}, "--search nprobe=3: e5.index has no search parameters"),
        ("HNSW16", {"nprobe": 3}, "--search nprobe=3: e5.index has efSearch"),
        ("IVF64,Flat", {"nprobe": 65}, "--search nprobe=65: e5.index takes 1 to 64"),
    ],
)
def test_parameters_that_it_has_not(
    tmp_path: Path, vectors: np.ndarray, factory: str, given: dict[str, int], message: str
) -> None:
    path = saved(tmp_path / "e5.index", factory, vectors)
    with pytest.raises(ValueError) as error:
        DenseBackend(path, Vectors(vectors[:1]), given)
    assert str(error.value) == message


def test_ids_that_are_no_rows(tmp_path: Path, vectors: np.ndarray) -> None:
    for ids, fine in ((np.arange(ROWS), True), (np.arange(ROWS) + 7, False)):
        index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(DIMENSION))
        index.add_with_ids(vectors, ids)
        faiss.write_index(index, os.fspath(tmp_path / "index"))
        if fine:
            [(rows, _)] = DenseBackend(tmp_path / "index", Vectors(vectors[:1])).search(["0"], 1)
            assert rows.tolist() == [0]
        else:
            with pytest.raises(ValueError, match="ids of their own; expected the passages' rows"):
                DenseBackend(tmp_path / "index", Vectors(vectors[:1]))


def test_no_vectors(tmp_path: Path, vectors: np.ndarray) -> None:
    faiss.write_index(faiss.IndexFlatIP(DIMENSION), os.fspath(tmp_path / "index"))
    with pytest.raises(ValueError, match="no vectors in it"):
        DenseBackend(tmp_path / "index", Vectors(vectors[:1]))
