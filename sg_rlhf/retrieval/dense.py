"""Dense search: an encoder's query vectors against a faiss index file.

The index is mapped from its file. Whatever is found is scored again in float64 from the stored
vectors and ordered by score, then row: float32 scores depend on how many queries are searched
together, these do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sg_rlhf.retrieval import faiss_file, scan
from sg_rlhf.retrieval.faiss_gpu import OnGpus

#: Candidates beyond topk that are scored again.
MARGIN = 16
#: Where the search for ties stops: so many equal passages are one passage.
MOST_CANDIDATES = 4096


class QueryEncoder(Protocol):
    """What searching needs of an encoder."""

    dimension: int

    def encode(self, texts: Sequence[str], kind: Any) -> np.ndarray: ...


class DenseBackend:
    """Search in a faiss index file with an encoder's query vectors.

    Any inner-product index that can give its vectors back will do, Search-R1's published
    `e5_Flat.index` among them.

    Args:
        search: parameters by name (`efSearch`, `nprobe`); others are `faiss_file.set_search`'s.
        threads: that share a search; by default as many as torch uses.
        gpus: search on GPUs with faiss.

    Attributes:
        parameters: what it searches with.
        raised: a line for each parameter that the file has lower.

    Raises:
        ValueError: if the file is no such index, or the encoder's vectors have another length.
    """

    def __init__(
        self,
        path: Path,
        encoder: QueryEncoder,
        search: Mapping[str, int] | None = None,
        threads: int | None = None,
        gpus: bool = False,
    ) -> None:
        self._index = faiss_file.read(path, encoder.dimension)
        self.parameters, self.raised = faiss_file.set_search(self._index, search or {}, path.name)
        self._encoder = encoder
        self._find: _Scan | _Search | OnGpus
        if gpus:
            self._find = OnGpus(self._index, path)
        elif faiss_file.is_scanned(self._index):
            self._find = _Scan(self._index, threads)
        else:
            self._find = _Search(self._index, threads)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query its rows and scores (cosines), best first, at most `topk`."""
        if not queries:
            return []
        return self.search_vectors(self._encoder.encode(queries, "query"), topk)

    def search_vectors(
        self, vectors_QD: np.ndarray, topk: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """`search` for query vectors, float32 [queries, dimension]."""
        results: list[Any] = [None] * len(vectors_QD)
        pending = np.arange(len(vectors_QD))
        wanted = topk + MARGIN
        while len(pending):
            count = min(wanted, len(self))
            found = self._find(vectors_QD[pending], count)
            open_ties = []
            for query, scores, rows, vectors in zip(pending, *found, strict=True):
                valid = rows >= 0  # faiss pads with -1 where a probed list runs out
                rows, vectors = rows[valid], vectors[valid].astype(np.float64)
                exact = vectors @ vectors_QD[query].astype(np.float64)
                order = np.lexsort((rows, -exact))[:topk]
                results[query] = rows[order], exact[order].astype(np.float32)
                # A passage that was left out may tie with the last one that we keep.
                full = len(rows) == count < min(len(self), MOST_CANDIDATES)
                if full and exact[order[-1]] <= scores[-1] + self._find.noise:
                    open_ties.append(query)
            pending = np.asarray(open_ties, dtype=np.int64)
            wanted *= 4
        return results


#: How far two float32 sums of one inner product of unit vectors lie apart, at most.
NOISE = 1e-6


class _Scan:
    """All vectors against all queries, on all cores; scores, rows and vectors of the best."""

    noise = NOISE

    def __init__(self, index: Any, threads: int | None) -> None:
        self._stored = scan.Stored(index)
        self._workers = scan.Workers(threads)
        self._backward = False

    def __call__(
        self, queries_QD: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stored = self._stored
        scores, rows = scan.best(
            stored.block, stored.rows, queries_QD, count, self._workers, self._backward
        )
        # Of a file that is larger than the memory, the end that was read last is still there.
        self._backward = not self._backward
        return scores, rows, stored.take(rows)


class _Search:
    """faiss's own search, of a graph or of lists; scores, rows and vectors of the best.

    The queries are cut among threads of ours: faiss's share the cores less well with torch's.
    """

    noise = NOISE

    def __init__(self, index: Any, threads: int | None) -> None:
        self._index = index
        self._workers = scan.Workers(threads)

    def __call__(
        self, queries_QD: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shares = np.array_split(queries_QD, min(self._workers.count, len(queries_QD)))
        found = self._workers.run(
            lambda number: self._index.search_and_reconstruct(shares[number], count), len(shares)
        )
        scores, rows, vectors = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, rows, vectors
