"""K-means from a file: faiss's centres, the same with any number of threads and after a kill."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from sg_rlhf.retrieval import kmeans
from sg_rlhf.retrieval.scan import Workers
from sg_rlhf.retrieval.vectors import VectorFile

ROWS, DIMENSION, LISTS = 5000, 32, 100


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def made() -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((200, DIMENSION))
    return unit(centres[rng.integers(200, size=ROWS)] + rng.standard_normal((ROWS, DIMENSION)))


def stored(folder: Path, vectors: np.ndarray) -> VectorFile:
    file = VectorFile(folder / "vectors.faiss", "fp32", *vectors.shape)
    file.create()
    file.write(0, vectors)
    return file


def learnt(file: VectorFile, state: Path, threads: int = 2, lists: int = LISTS) -> np.ndarray:
    with Workers(threads) as workers:
        return kmeans.learn(file, lists, state, workers, lambda count: None)


def objective(vectors: np.ndarray, centres: np.ndarray) -> float:
    """The mean cosine of a vector and its centre."""
    return float((vectors @ centres.T).max(axis=1).mean())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_centres_are_those_of_faiss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: np.ndarray, seed: int
) -> None:
    theirs = faiss.Kmeans(DIMENSION, LISTS, niter=kmeans.PASSES, spherical=True, seed=seed)
    theirs.train(made)
    monkeypatch.setattr(kmeans, "SEED", seed)
    ours = learnt(stored(tmp_path, made), tmp_path / "state.npz")
    assert ours == pytest.approx(theirs.centroids, abs=1e-5)
    some = made[np.random.default_rng(1).choice(ROWS, LISTS, replace=False)]
    assert objective(made, ours) > objective(made, some) + 0.05, "nothing was learnt"


def test_each_pass_is_the_textbooks(
    tmp_path: Path, made: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stored(tmp_path, made)
    monkeypatch.setattr(kmeans, "TILE", 64)  # so that the centres are two tiles
    monkeypatch.setattr(kmeans, "PASSES", 1)
    before, _ = kmeans._begin(file, LISTS, tmp_path / "none")
    after = learnt(file, tmp_path / "state.npz")
    nearest = (made @ before.T).argmax(axis=1)
    means = np.stack([made[nearest == row].mean(axis=0) for row in range(LISTS)])
    assert after == pytest.approx(unit(means), abs=1e-5)


def test_neither_threads_nor_a_kill_change_it(tmp_path: Path, made: np.ndarray) -> None:
    file = stored(tmp_path, made)
    expected = learnt(file, tmp_path / "one.npz", 1)
    assert np.array_equal(learnt(file, tmp_path / "three.npz", 3), expected)

    class Killed(BaseException):
        """What no handler of an error catches."""

    def mortal() -> np.ndarray:
        calls = iter(range(100))

        def done(count: int) -> None:
            if next(calls) == 1:  # 0 is what was there
                raise Killed

        return kmeans.learn(file, LISTS, tmp_path / "killed.npz", workers, done)

    with Workers(2) as workers:
        for _ in range(kmeans.PASSES):
            with pytest.raises(Killed):
                mortal()
        assert np.array_equal(mortal(), expected)


@pytest.mark.parametrize("lists", [3, 40, ROWS])
def test_more_lists_than_there_are_different_vectors(
    tmp_path: Path, made: np.ndarray, lists: int
) -> None:
    file = stored(tmp_path, np.repeat(made[:2], ROWS // 2, axis=0))
    found = learnt(file, tmp_path / "state.npz", lists=lists)
    assert found.shape == (lists, DIMENSION) and np.isfinite(found).all()
    assert objective(made[:2], found) > 0.999
