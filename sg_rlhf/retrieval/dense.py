"""Dense search: query vectors against a faiss index file.

torch searches a flat index, on a CPU or a GPU: its matrix product takes a fifth of the time of the
one in faiss's packages. faiss searches any other. The candidates are scored again in float64 from
the stored vectors and ordered by score, then row: float32 scores depend on how many queries are
searched together, these do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from sg_rlhf.retrieval import faiss_file
from sg_rlhf.retrieval.encoder import Encoder, torch_device

Hits = tuple[np.ndarray, np.ndarray]

#: Candidates beyond topk, which are scored in float64.
MARGIN = 16
#: Rows of one matrix product.
BLOCK = 2**16


class DenseBackend:
    """Search in a faiss index file, such as Search-R1's `e5_Flat.index`.

    Args:
        search: `efSearch` or `nprobe`; the default is `faiss_file.set_search`'s.
        device: of a flat search; a GPU holds a copy of the vectors.

    Raises:
        ValueError: the file is no index of this encoder, or the device cannot search it.
    """

    def __init__(
        self,
        path: Path,
        encoder: Encoder,
        search: Mapping[str, int] | None = None,
        device: str = "cpu",
    ) -> None:
        self._index = faiss_file.read(path, encoder.dimension)
        self.parameters = faiss_file.set_search(self._index, search or {}, path.name)
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

    The search runs on the device of `vectors_ND`, float32 or float16. `count` is at most N.

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
