"""Dense search with faiss: vectors in shards, an index made of them, and searching it.

The index is mapped from its file. Whatever faiss finds is scored again in float64 from the stored
vectors and ordered by score, then row: faiss's own float32 scores depend on how many queries are
searched together, these do not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
from tqdm import tqdm

TYPES = ("flat", "hnsw", "ivf")

#: Candidates beyond topk that are scored again.
MARGIN = 16
#: How far two float32 sums of one inner product of unit vectors lie apart, at most.
NOISE = 1e-6
#: Where the search for ties stops: so many equal passages are one passage.
MOST_CANDIDATES = 4096

HNSW = {"neighbours": 32, "ef_construction": 200, "ef_search": 128}
#: Vectors for k-means to learn one list's centre from; fewer than 39 make faiss warn.
TRAIN_PER_LIST = 64


class QueryEncoder(Protocol):
    """What searching needs of an encoder."""

    dimension: int

    def encode(self, texts: Sequence[str], kind: Any) -> np.ndarray: ...


def build(
    kind: str, shards: Sequence[Path], rows: int, out: Path, *, progress: bool = True
) -> dict[str, Any]:
    """Make an index of the vectors in `shards` (float32 [n, dimension] .npy files, in row order).

    Returns the parameters for the manifest. Needs the whole index in memory; serving it does not.
    """
    dimension = int(np.load(shards[0], mmap_mode="r").shape[1])
    parameters: dict[str, Any] = {}
    metric = faiss.METRIC_INNER_PRODUCT
    index: Any
    if kind == "flat":
        index = faiss.IndexFlatIP(dimension)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(dimension, HNSW["neighbours"], metric)
        index.hnsw.efConstruction = HNSW["ef_construction"]
        index.hnsw.efSearch = HNSW["ef_search"]
        parameters = dict(HNSW)
    else:
        lists = max(1, min(4 * math.isqrt(rows), rows // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, lists, metric)
        # A quarter of the lists: on 7,000 passages that finds 95 % of the exact neighbours, and
        # beyond 1,024 lists a smaller part does.
        index.nprobe = max(1, min(lists // 4, 256))
        index.train(_sample(shards, rows, lists * TRAIN_PER_LIST))
        parameters = {"lists": lists, "probes": index.nprobe}
    for shard in tqdm(
        shards, desc=f"building {kind}", unit="shard", disable=None if progress else True
    ):
        index.add(np.load(shard))
    faiss.write_index(index, os.fspath(out))
    return parameters


def _sample(shards: Sequence[Path], rows: int, size: int) -> np.ndarray:
    """`size` vectors, or all, drawn evenly over all shards with a fixed seed."""
    chosen = np.random.default_rng(0).permutation(rows)[:size]
    chosen.sort()
    parts, first = [], 0
    for shard in shards:
        vectors = np.load(shard, mmap_mode="r")
        inside = chosen[(chosen >= first) & (chosen < first + len(vectors))]
        parts.append(vectors[inside - first])
        first += len(vectors)
    return np.concatenate(parts)


class DenseBackend:
    """Search in a faiss index file with an encoder's query vectors.

    Any inner-product index that can give its vectors back will do, Search-R1's published
    `e5_Flat.index` among them.

    Raises:
        ValueError: if the file is no such index, or the encoder's vectors have another length.
    """

    def __init__(self, path: Path, encoder: QueryEncoder) -> None:
        try:
            self._index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"{path}: not a faiss index ({reason})") from None
        if self._index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError(f"{path}: not an inner-product index, which E5's vectors need")
        if self._index.d != encoder.dimension:
            raise ValueError(
                f"{path}: vectors of {self._index.d} numbers, but the encoder makes "
                f"{encoder.dimension}; expected the encoder that the index was built with"
            )
        self._encoder = encoder
        try:
            self._index.search_and_reconstruct(np.zeros((1, self._index.d), np.float32), 1)
        except RuntimeError:
            raise ValueError(
                f"{path}: a {type(self._index).__name__}, which does not give its vectors back; "
                "expected a flat, HNSW or IVF index"
            ) from None

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
            found = self._index.search_and_reconstruct(vectors_QD[pending], count)
            open_ties = []
            for query, scores, rows, vectors in zip(pending, *found, strict=True):
                valid = rows >= 0  # faiss pads with -1 where a probed list runs out
                rows, vectors = rows[valid], vectors[valid].astype(np.float64)
                exact = vectors @ vectors_QD[query].astype(np.float64)
                order = np.lexsort((rows, -exact))[:topk]
                results[query] = rows[order], exact[order].astype(np.float32)
                # A passage that faiss left out may tie with the last one that we keep.
                full = len(rows) == count < min(len(self), MOST_CANDIDATES)
                if full and exact[order[-1]] <= scores[-1] + NOISE:
                    open_ties.append(query)
            pending = np.asarray(open_ties, dtype=np.int64)
            wanted *= 4
        return results
