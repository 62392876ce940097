"""The centres of an index's lists: k-means over vectors that stay in their file.

    centre of a list = the mean of the vectors that are nearest to it, brought to length 1

is what faiss learns for inner products (`Clustering`, spherical), from the same start in as many
passes, but for rounding and for which list is split where one is empty. But faiss holds the float32
vectors that it learns from, which are more than the whole index of ivfpq; here each pass reads them
again, slice by slice, and keeps sums. The centres do not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
import torch
from faiss.contrib.clustering import reassign_centroids

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.common.index_sizes import ROUND, SLICE, TILE
from sg_rlhf.retrieval.scan import Workers
from sg_rlhf.retrieval.vectors import VectorFile

#: As faiss has them for lists.
PASSES, SEED = 10, 1234

Found = TypeVar("Found")


def learn(
    vectors: VectorFile, lists: int, state: Path, workers: Workers, done: Callable[[int], Any]
) -> np.ndarray:
    """The centres of `lists` lists of all `vectors`, float32 [lists, dimension].

    Args:
        state: a file of the centres after each pass, where a killed build goes on.
        done: called with the number of vectors of each pass that is over.
    """
    if lists == vectors.rows:
        return vectors.read(0, lists)
    centres, passes = _begin(vectors, lists, state)
    done(passes * vectors.rows)
    for number in range(passes, PASSES):
        centres = _pass(vectors, centres, workers, np.random.RandomState(SEED + number))
        temporary = state.with_suffix(".tmp")
        with disk_full_context(state), temporary.open("wb") as file:
            np.savez(file, centres=centres, passes=number + 1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(state)
        done(vectors.rows)
    return centres


def _begin(vectors: VectorFile, lists: int, state: Path) -> tuple[np.ndarray, int]:
    """The centres so far, after how many passes; at first they are some of the vectors."""
    if state.exists():
        with np.load(state) as before:
            return before["centres"], int(before["passes"])
    rows = np.empty(vectors.rows, np.int32)
    faiss.rand_perm(faiss.swig_ptr(rows), vectors.rows, SEED + 1)
    return _unit(vectors.take(rows[:lists])), 0


def _pass(
    vectors: VectorFile, centres_LD: np.ndarray, workers: Workers, rng: np.random.RandomState
) -> np.ndarray:
    """The means of the vectors nearest to each centre, of length 1; a list of none is split off."""
    sums, sizes = np.zeros_like(centres_LD), np.zeros(len(centres_LD), np.int64)
    near = torch.from_numpy(centres_LD)

    def of_slice(
        block: torch.Tensor, product: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = nearest(block, near, product)
        order = np.argsort(found, kind="stable")
        which, starts, counts = np.unique(found[order], return_index=True, return_counts=True)
        return which, counts, np.add.reduceat(block.numpy()[order], starts, axis=0)

    for which, counts, some in each_slice(vectors, workers, of_slice):
        sums[which] += some
        sizes[which] += counts
    _unit(sums)
    reassign_centroids(sizes, sums, rng)
    return _unit(sums)


def _unit(vectors_ND: np.ndarray) -> np.ndarray:
    """In place, but for those of length 0."""
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors_ND, vectors_ND))[:, None]
    return np.divide(vectors_ND, lengths, out=vectors_ND, where=lengths > 0)


def nearest(block: torch.Tensor, centres: torch.Tensor, product: torch.Tensor) -> np.ndarray:
    """The row of the centre with the largest inner product, int64 [n] for vectors [n, dimension].

    Args:
        product: room for n x `TILE` numbers.
    """
    best = torch.full((len(block),), -torch.inf)
    found = torch.zeros(len(block), dtype=torch.int64)
    for first in range(0, len(centres), TILE):
        some = centres[first : first + TILE]
        scores = product[: len(block) * len(some)].view(len(block), len(some))
        torch.mm(block, some.T, out=scores)
        values, rows = scores.max(dim=1)
        better = values > best
        best[better], found[better] = values[better], rows[better] + first
    return found.numpy()


def each_slice(
    vectors: VectorFile,
    workers: Workers,
    job: Callable[[torch.Tensor, torch.Tensor], Found],
    first: int = 0,
) -> Iterator[Found]:
    """`job(block, product)` of all vectors from row `first` on, `SLICE` by `SLICE`, in their order.

    Slices are of one size whatever the machine, as the last bit of a product depends on it.
    """
    # Once: taken and given back by threads, they would add up to much more.
    products = [torch.empty(SLICE * TILE) for _ in range(workers.count)]
    rows = SLICE * ROUND * workers.count
    for start in range(first, vectors.rows, rows):
        yield from _round(vectors, workers, job, products, start, min(start + rows, vectors.rows))


def _round(
    vectors: VectorFile,
    workers: Workers,
    job: Callable[[torch.Tensor, torch.Tensor], Found],
    products: list[torch.Tensor],
    start: int,
    stop: int,
) -> list[Found]:
    starts = range(start, stop, SLICE)
    found: dict[int, Found] = {}
    # Taking the next one from an iterator of C's is atomic.
    left = iter(starts)

    def work(number: int) -> None:
        for row in left:
            block = vectors.read(row, min(row + SLICE, stop))
            found[row] = job(torch.from_numpy(block), products[number])

    workers.run(work, min(workers.count, len(starts)))
    return [found[row] for row in starts]
