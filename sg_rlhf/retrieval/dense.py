"""Dense search: query vectors against a faiss index file.

torch searches a flat index, on a CPU or a GPU: its matrix product takes a fifth of the time of the
one in faiss's packages. faiss searches any other. The candidates are scored again in float64 from
the stored vectors and ordered by score, then row: float32 scores depend on how many queries are
searched together, these do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from sg_rlhf.retrieval.encoder import Encoder, torch_device

Hits = tuple[np.ndarray, np.ndarray]

#: Candidates beyond topk, which are scored in float64.
MARGIN = 16
#: Rows of one matrix product.
BLOCK = 2**16
#: Smallest efSearch unless another is given; with faiss's 16 HNSW misses many of the nearest.
EF_SEARCH = 128
#: Without another, nprobe is a quarter of the lists, at most this many; faiss's default is 1.
MAX_NPROBE = 256


class DenseBackend:
    """Search in a faiss index file, such as Search-R1's `e5_Flat.index`.

    `search` sets `efSearch` or `nprobe`. `device` is that of a flat search. ValueError if the file
    is no index of this encoder, or the device cannot search it.
    """

    def __init__(
        self,
        path: Path,
        encoder: Encoder,
        search: Mapping[str, int] | None = None,
        device: str = "cpu",
    ) -> None:
        self._index = open_file(path, encoder.dimension)
        self.parameters = set_search(self._index, search or {}, path.name)
        self._encoder = encoder
        self._flat = flat_vectors(self._index)
        if device != "cpu":
            self._flat = _on_gpu(self._flat, torch_device("--search-device", device), path)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """For each query its rows and scores (cosines), best first, at most `topk`."""
        if not queries:
            return []
        queries_QD = self._encoder.encode(queries, "query")
        count = min(topk + MARGIN, len(self))
        if self._flat is None:
            _, rows_QC, vectors_QCD = self._index.search_and_reconstruct(queries_QD, count)
        else:
            rows_QC, vectors_QCD = nearest(self._flat, queries_QD, count)
        hits = []
        for query_D, rows_C, vectors_CD in zip(queries_QD, rows_QC, vectors_QCD, strict=True):
            valid = rows_C >= 0  # faiss pads with -1 where the probed lists run out
            rows = rows_C[valid]
            scores = vectors_CD[valid].astype(np.float64) @ query_D.astype(np.float64)
            order = np.lexsort((rows, -scores))[:topk]
            hits.append((rows[order], scores[order].astype(np.float32)))
        return hits


@torch.inference_mode()
def nearest(
    vectors_ND: torch.Tensor, queries_QD: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the largest inner products with each query, and their vectors.

    Args:
        vectors_ND: float32 or float16; the search runs on their device.
        count: at most N.

    Returns:
        rows int64 [Q, count] and vectors float32 [Q, count, D].
    """
    queries = torch.from_numpy(queries_QD).to(vectors_ND.device)
    scores_QC = queries.new_empty(len(queries), 0)
    rows_QC = queries.new_empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(vectors_ND), BLOCK):
        block_BD = vectors_ND[start : start + BLOCK].float()
        scores, rows = (queries @ block_BD.T).topk(min(count, len(block_BD)))
        scores_QC = torch.cat([scores_QC, scores], dim=1)
        rows_QC = torch.cat([rows_QC, rows + start], dim=1)
        scores_QC, best = scores_QC.topk(min(count, scores_QC.shape[1]))
        rows_QC = rows_QC.gather(1, best)
    return rows_QC.cpu().numpy(), vectors_ND[rows_QC].float().cpu().numpy()


def open_file(path: Path, dimension: int) -> Any:
    """The memory-mapped index in a file; ValueError if it does not suit the encoder."""
    try:
        index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"{path}: not a faiss index ({reason})") from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{path}: not an inner-product index, which E5's vectors need")
    if index.d != dimension:
        raise ValueError(
            f"{path}: vectors of {index.d} numbers, but the encoder makes "
            f"{dimension}; expected the encoder that the index was built with"
        )
    if not index.ntotal:
        raise ValueError(f"{path}: no vectors in it")
    if isinstance(faiss.downcast_index(index), faiss.IndexIDMap):
        raise ValueError(
            f"{path}: vectors with ids of their own; expected the passages' rows, 0 to "
            f"{index.ntotal - 1}"
        )
    try:
        if flat_vectors(index) is None:  # a search of a flat one would read the whole file
            index.search_and_reconstruct(np.zeros((1, index.d), np.float32), 1)
    except RuntimeError:
        raise ValueError(
            f"{path}: a {type(index).__name__}, which does not give its vectors back; "
            "expected a flat, HNSW or IVF index"
        ) from None
    return index


def set_search(index: Any, given: Mapping[str, int], where: str) -> dict[str, int]:
    """Set the given search parameters, and usable values of the others; returns them all."""
    used = {}
    if ivf := faiss.try_extract_index_ivf(index):
        usable = max(1, min(ivf.nlist // 4, MAX_NPROBE))
        used["nprobe"] = usable if ivf.nprobe == 1 else int(ivf.nprobe)
    if isinstance(graph := faiss.downcast_index(index), faiss.IndexHNSW):
        used["efSearch"] = max(int(graph.hnsw.efSearch), EF_SEARCH)
    for name, value in given.items():
        if name not in used:
            has = f"has {', '.join(used)}" if used else "has no search parameters"
            raise ValueError(f"--search {name}={value}: {where} {has}")
    used |= given
    for name, value in used.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    return used


def flat_vectors(index: Any) -> torch.Tensor | None:
    """The mapped vectors of a flat index, float32 or float16 [rows, dimension]; else None."""
    if isinstance(index, faiss.IndexFlat):
        dtype: type = np.float32
    elif (
        type(index) is faiss.IndexScalarQuantizer
        and index.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    ):
        dtype = np.float16
    else:
        return None
    codes = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
    return torch.from_numpy(codes.view(dtype).reshape(index.ntotal, index.d))


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
