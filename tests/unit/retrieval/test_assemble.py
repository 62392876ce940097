"""Index files: byte for byte what faiss would write, also after a kill at any stage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sg_rlhf.common.index_sizes import KINDS, PRECISIONS, Precision, Spec, spec
from sg_rlhf.retrieval import assemble, job
from sg_rlhf.retrieval.scan import Workers
from sg_rlhf.retrieval.vectors import VectorFile

ROWS, DIMENSION, BLOCK = 3000, 32, 1024


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCK_BYTES", "LISTS_BLOCK_BYTES"):
        monkeypatch.setattr(assemble, name, BLOCK * DIMENSION * 4)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A graph that several threads make is another one each time."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def unit(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((60, DIMENSION))
    made = centres[rng.integers(60, size=rows)] + 0.6 * rng.standard_normal((rows, DIMENSION))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def vectors(folder: Path, precision: Precision) -> VectorFile:
    folder.mkdir(exist_ok=True)
    file = VectorFile(folder / "vectors.faiss", precision, ROWS, DIMENSION)
    file.create()
    file.write(0, unit(ROWS, 1))
    return file


def made(folder: Path, wanted: Spec) -> Path:
    file = vectors(folder, wanted.vectors)
    assemble.assemble(wanted, file, folder / "index.faiss", progress=False)
    return folder / "index.faiss"


def read(path: Path) -> Any:
    return faiss.read_index(os.fspath(path))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_faiss_reads_it_and_its_size_was_foreseen(
    tmp_path: Path, kind: str, precision: Precision
) -> None:
    wanted = spec(kind, ROWS, DIMENSION, precision)
    path = made(tmp_path / "build", wanted)
    index = read(path)
    assert index.ntotal == ROWS
    assert bytes(faiss.serialize_index(index)) == path.read_bytes()
    assert path.stat().st_size == pytest.approx(wanted.index_bytes, rel=0.02)
    _, rows = index.search(unit(ROWS, 1)[:100], 1)
    # pq_m 4: a passage is 4 bytes, and other passages have the same ones.
    assert np.mean(rows[:, 0] == np.arange(100)) > (0.3 if kind == "ivfpq" else 0.97)


@pytest.mark.parametrize("kind", ["ivf", "ivfsq8", "ivfpq"])
def test_lists_are_those_that_faiss_fills(tmp_path: Path, kind: str) -> None:
    wanted = spec(kind, ROWS, DIMENSION, "fp32")
    path = made(tmp_path / "build", wanted)
    index = read(path.with_name(job.TRAINED))
    index.nprobe = wanted.search["nprobe"]
    for start in range(0, ROWS, 500):
        index.add(unit(ROWS, 1)[start : start + 500])
    assert bytes(faiss.serialize_index(index)) == path.read_bytes()


def test_few_lists_have_as_many_codes(tmp_path: Path) -> None:
    """Four lists learn from fewer vectors than there are values of a code."""
    four = spec("ivfpq", ROWS, DIMENSION, build={"nlist": 4})
    assert four.sample_rows < 2 ** four.build["pq_bits"]
    index = read(made(tmp_path / "build", four))
    index.nprobe = 4
    _, rows = index.search(unit(ROWS, 1)[:100], 1)
    assert np.mean(rows[:, 0] == np.arange(100)) > 0.2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "step"), [("hnsw", 1), ("ivfpq", 7)])
def test_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int
) -> None:
    """Later and later in every stage: the file is that of no kill at all."""
    wanted = spec(kind, ROWS, DIMENSION, "fp32")
    expected = made(tmp_path / "undisturbed", wanted).read_bytes()
    monkeypatch.setattr(assemble, "CHECKPOINT_SECONDS", 0.0)
    file = vectors(tmp_path / "killed", "fp32")
    kills, budget = 0, 0

    class Killed(BaseException):
        """What no handler of an error catches."""

    reading = VectorFile.read

    def mortal(self: VectorFile, start: int, stop: int) -> np.ndarray:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return reading(self, start, stop)

    monkeypatch.setattr(VectorFile, "read", mortal)
    out = tmp_path / "killed" / "index.faiss"
    while not out.exists():
        # What is read before the first new block is read again at each start.
        budget, left = budget + step, budget
        try:
            assemble.assemble(wanted, file, out, progress=False)
        except Killed:
            kills += 1
        assert kills < 50
    assert out.read_bytes() == expected
    assert kills >= 3


def test_a_graph_takes_its_memory_once(tmp_path: Path) -> None:
    """Vectors of C++ double as they grow; these have their room before they do."""
    wanted = spec("hnsw", ROWS, DIMENSION, "fp32")
    file = vectors(tmp_path, "fp32")
    index = assemble._graph_so_far(wanted, file, tmp_path / job.GRAPH)
    storage = faiss.downcast_index(index.storage)
    # Where they lie when the first vector is there is where they lie at the end.
    index.add(unit(ROWS, 1)[:1])
    before = int(storage.codes.data()), int(index.hnsw.neighbors.data())
    index.add(unit(ROWS, 1)[1:])
    assert (int(storage.codes.data()), int(index.hnsw.neighbors.data())) == before


@pytest.mark.parametrize("kind", ["ivf", "ivfsq8", "ivfpq"])
def test_codes_learn_what_faiss_would_teach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(assemble, "CODES_BYTES", 3 * 4 * ROWS * 8)  # 3 of ivfpq's 4 parts at once
    wanted = spec(kind, ROWS, DIMENSION, "fp32")
    file = vectors(tmp_path, "fp32")
    with Workers() as workers:
        ours = assemble._trained(wanted, file, workers, tmp_path / "index.faiss", False)
    theirs = assemble._empty_ivf(wanted)
    theirs.quantizer.add(ours.quantizer.reconstruct_n(0, wanted.build["nlist"]))
    # So few vectors that the sample is all there is.
    theirs.train(unit(ROWS, 1))
    assert bytes(faiss.serialize_index(ours)) == bytes(faiss.serialize_index(theirs))
