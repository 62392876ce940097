"""The scan is exact search, whatever the vectors are stored as and however many threads share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from sg_rlhf.retrieval import scan

ROWS, DIMENSION = 3 * scan.BLOCK + 77, 20
METRIC = faiss.METRIC_INNER_PRODUCT


@pytest.fixture(scope="module", params=[1, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[scan.Workers]:
    with scan.Workers(request.param) as made:
        yield made


def unit(rows: int, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((rows, DIMENSION))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def stored(kind: str) -> Any:
    types = {"fp16": faiss.ScalarQuantizer.QT_fp16, "sq8": faiss.ScalarQuantizer.QT_8bit}
    index = (
        faiss.IndexFlatIP(DIMENSION)
        if kind == "flat"
        else faiss.IndexScalarQuantizer(DIMENSION, types[kind], METRIC)
    )
    index.train(unit(ROWS, 0))
    index.add(unit(ROWS, 0))
    return index


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["flat", "fp16", "sq8"])
def test_the_best_rows_with_their_scores(workers: scan.Workers, kind: str, backward: bool) -> None:
    index, queries = stored(kind), unit(30, 1)
    vectors = scan.Stored(index)
    scores, rows = scan.best(vectors.block, ROWS, queries, 12, workers, backward)
    every = queries.astype(np.float64) @ index.reconstruct_n(0, ROWS).T.astype(np.float64)
    expected = np.argsort(-every, axis=1, kind="stable")[:, :12]
    assert np.array_equal(rows, expected)
    assert scores == pytest.approx(np.take_along_axis(every, rows, axis=1), abs=1e-6)
    assert np.array_equal(vectors.take(rows[0]), index.reconstruct_batch(rows[0]))
    assert vectors.take(rows).shape == (30, 12, DIMENSION)


def test_many_queries_and_every_row(workers: scan.Workers) -> None:
    vectors = scan.Stored(stored("flat"))
    few, queries = 50, unit(2 * scan.QUERIES + 1, 2)
    scores, rows = scan.best(vectors.block, few, queries, few, workers)
    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(few), (len(queries), 1)))
    assert (np.diff(scores, axis=1) <= 0).all()


def test_other_threads_keep_their_cores() -> None:
    before = torch.get_num_threads()
    with scan.Workers(3) as workers:
        assert workers.run(lambda _: torch.get_num_threads(), 9) == [1] * 9
        assert torch.get_num_threads() == before
        with scan.Workers(1) as later:
            assert later.run(lambda _: torch.get_num_threads(), 1) == [1]
    assert torch.get_num_threads() == before


def test_a_vector_that_is_no_number_is_not_found(workers: scan.Workers) -> None:
    vectors = unit(100, 3)
    vectors[7] = np.nan
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(vectors)
    _, rows = scan.best(scan.Stored(index).block, 100, unit(4, 4), 100, workers)
    assert not (rows == 7).any() and (rows[:, -1] == -1).all()
