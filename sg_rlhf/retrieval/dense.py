"""Dense search: query vectors against a faiss index file.

A flat index is searched exactly in torch, on a CPU or a GPU (`flat_search`), any other by faiss.
What is found is scored again in float64 from the stored vectors and ordered by score, then row:
float32 scores depend on how many queries are searched together, these do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from sg_rlhf.retrieval import faiss_file
from sg_rlhf.retrieval.encoder import torch_device

T = TypeVar("T")
Hits = tuple[np.ndarray, np.ndarray]

#: Candidates of faiss, and groups of rows of a flat search, beyond topk: scored in float64.
MARGIN, FLAT_MARGIN = 16, 5
#: Numbers of the vectors that a thread scores in float64 at once.
RESCORED = 2**20
#: Rows of the matrix product of a block, by device.
BLOCK = {"cpu": 4096, "cuda": 2**17}
#: Queries in one pass over the vectors.
QUERIES = 256
#: Rows of a group: one up to FEW_ROWS rows, then GROUP, and more from GROUP * MAX_GROUPS rows on.
GROUP, FEW_ROWS, MAX_GROUPS = 4, 2**14, 2**16


class Threads:
    """Threads that each compute on one core, whatever torch uses elsewhere.

    torch's own threads wait for each other after every operation, which on cores with other work
    takes longer than the operation.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        everywhere = torch.get_num_threads()
        started = threading.Barrier(count)

        def prepare(_: int) -> None:
            torch.get_num_threads()  # makes torch set up this thread, which would undo the next
            torch.set_num_threads(1)
            started.wait()

        self._pool = ThreadPoolExecutor(count, thread_name_prefix="scan")
        list(self._pool.map(prepare, range(count)))
        torch.set_num_threads(everywhere)  # new threads start with the number that was set last

    def run(self, work: Callable[[int], T], parts: Iterable[int]) -> list[T]:
        """`work` of each part."""
        return list(self._pool.map(work, parts))


class QueryEncoder(Protocol):
    """The part of an encoder that a search uses."""

    dimension: int

    def encode(self, texts: Sequence[str], kind: Any) -> np.ndarray: ...


class DenseBackend:
    """Search in a faiss index file with an encoder's query vectors.

    Any inner-product index that can reconstruct its vectors will do, Search-R1's published
    `e5_Flat.index` among them.

    Args:
        search: parameters by name (`efSearch`, `nprobe`); the others are `faiss_file.set_search`'s.
        device: of a flat search; a GPU holds a copy of the vectors.

    Attributes:
        parameters: the parameters that it searches with.
        adjusted: one line for each parameter that is lower in the file.

    Raises:
        ValueError: the file is no such index, the encoder's vectors have another length, or the
            device cannot search this index.
    """

    def __init__(
        self,
        path: Path,
        encoder: QueryEncoder,
        search: Mapping[str, int] | None = None,
        device: str = "cpu",
    ) -> None:
        self._index = faiss_file.read(path, encoder.dimension)
        self.parameters, self.adjusted = faiss_file.set_search(self._index, search or {}, path.name)
        self._encoder = encoder
        self._flat = faiss_file.flat_vectors(self._index)
        self._threads = Threads(torch.get_num_threads()) if device == "cpu" else None
        if device != "cpu":
            self._flat = _on_gpu(self._flat, torch_device("--search-device", device), path)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """For each query its rows and scores (cosines), best first, at most `topk`."""
        if not queries:
            return []
        queries_QD = self._encoder.encode(queries, "query")
        topk = min(topk, len(self))
        if self._flat is not None:
            parts = torch.from_numpy(queries_QD).to(self._flat.device).split(QUERIES)
            found = (flat_search(self._flat, part, topk, self._threads) for part in parts)
            return [hits for some in found for hits in some]
        count = min(topk + MARGIN, len(self))
        _, rows, vectors = self._index.search_and_reconstruct(queries_QD, count)
        hits = []
        for query, some_rows, some_vectors in zip(queries_QD, rows, vectors, strict=True):
            valid = some_rows >= 0  # faiss pads with -1 where the probed lists run out
            exact = some_vectors[valid].astype(np.float64) @ query.astype(np.float64)
            hits.append(_best(some_rows[valid], exact, topk))
        return hits


def flat_search(
    vectors_ND: torch.Tensor, queries_QD: torch.Tensor, topk: int, threads: Threads | None = None
) -> list[Hits]:
    """The exact `topk` rows of each query by inner product, on the tensors' device.

    Rows are grouped: of each group only its largest float32 score is kept, and all rows of the best
    groups are scored again in float64. The `topk` best rows lie in the `topk` best groups, so this
    is exact. It needs no sorting while the vectors are read, which they are once, in order.

    Args:
        vectors_ND: float32 or float16.
        queries_QD: float32.
        topk: at most N.
        threads: that share the work on a CPU.

    Returns:
        for each query rows int64 [topk] and scores float32 [topk], best first, ties by row.
    """
    (rows, width), count, device = vectors_ND.shape, len(queries_QD), vectors_ND.device
    run = threads.run if threads else lambda work, parts: list(map(work, parts))
    group = max(min(GROUP, -(-rows // FEW_ROWS)), -(-rows // MAX_GROUPS))
    block = max(1, BLOCK[device.type] // group) * group
    whole = rows - rows % group
    queries_DQ = queries_QD.T.contiguous()
    largest_GQ = torch.empty(whole // group, count, device=device)
    # `next` of an iterator of C holds the GIL, so threads may share it.
    starts = iter(range(0, whole, block))

    @torch.inference_mode()
    def scan(_: int) -> None:
        product = torch.empty(min(block, whole), count, device=device)
        for start in starts:
            some = vectors_ND[start : min(start + block, whole)].float()
            scores = torch.mm(some, queries_DQ, out=product[: len(some)])
            groups = slice(start // group, (start + len(some)) // group)
            torch.amax(scores.view(-1, group, count), 1, out=largest_GQ[groups])

    workers = threads.count if threads else 1
    run(scan, range(workers))
    best = min(topk + FLAT_MARGIN, len(largest_GQ))
    inside = torch.arange(group, device=device)
    rest = torch.arange(whole, rows, device=device)
    rescored = (best * group + len(rest)) * width
    at_once = max(1, min(RESCORED // rescored, -(-count // workers)))

    @torch.inference_mode()
    def rescore(first: int) -> Hits:
        part = slice(first, first + at_once)
        groups_QG = largest_GQ[:, part].T.contiguous().topk(best).indices
        rows_QC = (groups_QG[:, :, None] * group + inside).flatten(1)
        rows_QC = torch.cat([rows_QC, rest.expand(len(rows_QC), -1)], dim=1)
        exact = torch.bmm(vectors_ND[rows_QC].double(), queries_QD[part, :, None].double())
        return _best(rows_QC.cpu().numpy(), exact[:, :, 0].cpu().numpy(), topk)

    parts = run(rescore, range(0, count, at_once))
    return [hits for found in parts for hits in zip(*found, strict=True)]


def _best(rows: np.ndarray, scores: np.ndarray, topk: int) -> Hits:
    """The `topk` rows of the highest scores along the last axis, ties by row."""
    order = np.lexsort((rows, -scores))[..., :topk]
    scores = np.take_along_axis(scores, order, -1).astype(np.float32)
    return np.take_along_axis(rows, order, -1), scores


def _on_gpu(vectors: torch.Tensor | None, device: torch.device, path: Path) -> torch.Tensor:
    if vectors is None:
        raise ValueError(
            f"--search-device {device}: {path.name} is not a flat index; a GPU searches only those"
        )
    try:
        return vectors.to(device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--search-device {device}: {path.name}: {reason}") from None
