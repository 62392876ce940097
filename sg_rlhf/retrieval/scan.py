"""Exact search: every stored vector against every query, in blocks that threads share.

A block of vectors is multiplied with all queries at once (torch), and faiss's heaps keep the best
of each query. Each thread takes the next block that nobody has taken, so that together they read
the file once from end to end; the best of all threads are merged. At 64 queries that is faster than
`IndexFlat.search`, whose inner product is another library's; and it searches fp16, for which faiss
has no product of matrices, at the same speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
import torch

#: Vectors in a block: their scores, and their float32 copies if they are fp16, stay in the cache.
BLOCK = 2048
#: Queries searched together; more would make the scores of a block leave the cache.
QUERIES = 512

Block = Callable[[int, int, torch.Tensor], torch.Tensor]


class Workers:
    """Threads that each compute on one core, whatever torch and faiss use elsewhere."""

    def __init__(self, count: int | None = None) -> None:
        everywhere = torch.get_num_threads()
        self.count = count or everywhere
        started = threading.Barrier(self.count)

        def prepare() -> None:
            torch.get_num_threads()  # makes torch set up this thread, which would undo the next
            torch.set_num_threads(1)
            faiss.omp_set_num_threads(1)
            started.wait()

        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="scan")
        list(self._pool.map(lambda _: prepare(), range(self.count)))
        # It is also the number that threads to come start with.
        torch.set_num_threads(everywhere)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, job: Callable[[int], Any], count: int) -> list[Any]:
        """`job(0)` to `job(count - 1)`, each in one of the threads."""
        return list(self._pool.map(job, range(count)))


def best(
    block: Block,
    rows: int,
    queries_QD: np.ndarray,
    k: int,
    workers: Workers,
    backward: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The `k` best rows of each query: scores float32 [Q, k] from the best on, rows int64 [Q, k].

    Args:
        block: `(start, stop, buffer)` gives rows start to stop, float32, in the buffer
            [BLOCK, dimension] or elsewhere.
        k: at most `rows`.
        backward: read the file from its end on.
    """
    scores = np.empty((len(queries_QD), k), np.float32)
    found = np.empty((len(queries_QD), k), np.int64)
    for first in range(0, len(queries_QD), QUERIES):
        some = slice(first, first + QUERIES)
        scores[some], found[some] = _best(block, rows, queries_QD[some], k, workers, backward)
    return scores, found


def _best(
    block: Block, rows: int, queries_QD: np.ndarray, k: int, workers: Workers, backward: bool
) -> tuple[np.ndarray, np.ndarray]:
    count, dimension = queries_QD.shape
    queries = torch.from_numpy(np.ascontiguousarray(queries_QD, np.float32))
    every = range(0, rows, BLOCK)
    shares = min(workers.count, len(every))
    # Taking the next one from an iterator of C's is atomic.
    starts = iter(reversed(every) if backward else every)
    scores = np.empty((shares, count, k), np.float32)
    found = np.empty((shares, count, k), np.int64)

    def share(number: int) -> None:
        heaps = faiss.float_minheap_array_t()
        heaps.nh, heaps.k = count, k
        heaps.val, heaps.ids = faiss.swig_ptr(scores[number]), faiss.swig_ptr(found[number])
        heaps.heapify()
        buffer, products = torch.empty(BLOCK, dimension), torch.empty(count * BLOCK)
        for start in starts:
            vectors = block(start, min(start + BLOCK, rows), buffer)
            product = products[: count * len(vectors)].view(count, len(vectors))
            torch.mm(queries, vectors.T, out=product)
            heaps.addn(len(vectors), faiss.swig_ptr(product.numpy()), start, 0, count)
        heaps.reorder()

    workers.run(share, shares)
    if shares == 1:
        return scores[0], found[0]
    return faiss.merge_knn_results(scores, found, keep_max=True)


class Stored:
    """The vectors of a flat or scalar-quantized faiss index, where they lie."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.rows, self.dimension = int(index.ntotal), int(index.d)
        size = self.rows * index.code_size
        self._codes = faiss.rev_swig_ptr(index.codes.data(), size).reshape(self.rows, -1)
        kind = None if isinstance(index, faiss.IndexFlat) else index.sq.qtype
        self._half = kind == faiss.ScalarQuantizer.QT_fp16
        dtype = np.float32 if kind is None else np.float16 if self._half else None
        # None where decoding is more than another type of number.
        self._numbers = None if dtype is None else torch.from_numpy(self._codes.view(dtype))

    def block(self, start: int, stop: int, buffer: torch.Tensor) -> torch.Tensor:
        """Rows `start` to `stop`, as `best` asks for them."""
        if self._numbers is None:
            part = buffer[: stop - start]
            self._index.sa_decode(self._codes[start:stop], part.numpy())
            return part
        numbers = self._numbers[start:stop]
        return buffer[: stop - start].copy_(numbers) if self._half else numbers

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of these rows, float32 [..., dimension] for rows [...]."""
        if self._numbers is not None:
            return self._numbers.numpy()[rows].astype(np.float32)
        decoded = self._index.sa_decode(self._codes[rows.ravel()])
        return decoded.reshape(*rows.shape, self.dimension)
