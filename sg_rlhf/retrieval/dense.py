"""Dense search: query vectors against a faiss index file.

A flat index is searched exactly in torch, on a CPU or a GPU (`flat_search`), any other by faiss.
What is found is scored again in float64 from the stored vectors and ordered by score, then row:
float32 scores depend on how many queries are searched together, these do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import torch

from sg_rlhf.retrieval import faiss_file
from sg_rlhf.retrieval.encoder import torch_device

Hits = tuple[np.ndarray, np.ndarray]

#: Candidates (faiss) or groups of rows (flat search) beyond topk that are scored in float64.
MARGIN = 8
#: Rows of the matrix product of a block, by device.
BLOCK = {"cpu": 4096, "cuda": 2**17}
#: Queries in one pass over the vectors.
QUERIES = 256
#: Rows of a group at least, and groups at most (of larger indexes the groups grow).
GROUP, MAX_GROUPS = 8, 2**16


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
        raised: one line for each parameter that is lower in the file.

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
        self.parameters, self.raised = faiss_file.set_search(self._index, search or {}, path.name)
        self._encoder = encoder
        self._flat = faiss_file.flat_vectors(self._index)
        if device != "cpu":
            self._flat = _on_gpu(self._flat, torch_device("--search-device", device), path)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """For each query its rows and scores (cosines), best first, at most `topk`."""
        if not queries:
            return []
        return self.search_vectors(self._encoder.encode(queries, "query"), topk)

    def search_vectors(self, queries_QD: np.ndarray, topk: int) -> list[Hits]:
        """`search` for query vectors, float32 [queries, dimension]."""
        topk = min(topk, len(self))
        if self._flat is not None:
            queries = torch.from_numpy(np.ascontiguousarray(queries_QD)).to(self._flat.device)
            parts = queries.split(QUERIES)
            return [hits for part in parts for hits in flat_search(self._flat, part, topk)]
        count = min(topk + MARGIN, len(self))
        _, rows, vectors = self._index.search_and_reconstruct(queries_QD, count)
        found = []
        for query, some_rows, some_vectors in zip(queries_QD, rows, vectors, strict=True):
            valid = some_rows >= 0  # faiss pads with -1 where the probed lists run out
            exact = some_vectors[valid].astype(np.float64) @ query.astype(np.float64)
            found.append(_best(some_rows[valid], exact, topk))
        return found


@torch.inference_mode()
def flat_search(vectors_ND: torch.Tensor, queries_QD: torch.Tensor, topk: int) -> list[Hits]:
    """The exact `topk` rows of each query by inner product, on the tensors' device.

    Rows are grouped: of each group only its largest float32 score is kept, and all rows of the best
    groups are scored again in float64. The `topk` best rows lie in the `topk` best groups, so this
    is exact. It needs no sorting while the vectors are read, which they are once, in order.

    Args:
        vectors_ND: float32 or float16.
        queries_QD: float32.
        topk: at most N.

    Returns:
        for each query rows int64 [topk] and scores float32 [topk], best first, ties by row.
    """
    rows, device = len(vectors_ND), vectors_ND.device
    group = max(GROUP, -(-rows // MAX_GROUPS))
    block = max(1, BLOCK[device.type] // group) * group
    whole = rows - rows % group
    queries_DQ = queries_QD.T.contiguous()
    largest_GQ = torch.empty(whole // group, len(queries_QD), device=device)
    product = torch.empty(min(block, whole), len(queries_QD), device=device)
    for start in range(0, whole, block):
        some = vectors_ND[start : min(start + block, whole)].float()
        scores = torch.mm(some, queries_DQ, out=product[: len(some)])
        groups = slice(start // group, (start + len(some)) // group)
        torch.amax(scores.view(-1, group, len(queries_QD)), 1, out=largest_GQ[groups])
    count = min(topk + MARGIN, len(largest_GQ))
    best_QG = largest_GQ.T.contiguous().topk(count).indices
    inside = torch.arange(group, device=device)
    rest = torch.arange(whole, rows, device=device)
    found = []
    for query, best in zip(queries_QD, best_QG, strict=True):
        candidates = torch.cat([(best[:, None] * group + inside).flatten(), rest])
        exact = vectors_ND[candidates].double() @ query.double()
        found.append(_best(candidates.cpu().numpy(), exact.cpu().numpy(), topk))
    return found


def _best(rows: np.ndarray, scores: np.ndarray, topk: int) -> Hits:
    order = np.lexsort((rows, -scores))[:topk]
    return rows[order], scores[order].astype(np.float32)


def _on_gpu(vectors: torch.Tensor | None, device: torch.device, path: Path) -> torch.Tensor:
    if vectors is None:
        raise ValueError(
            f"--search-device {device}: {path.name} is no flat index, which alone a GPU searches"
        )
    try:
        return vectors.to(device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--search-device {device}: {path.name}: {reason}") from None


def limit_threads(count: int) -> None:
    """Use `count` threads for encoding and searching in this process."""
    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)
