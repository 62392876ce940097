"""faiss's search on GPUs, where a faiss that was built for them is installed. Not run by us.

The index is spread over all GPUs in fp16; what they find is scored again from the file's vectors,
as after any other search. HNSW stays on the CPU: faiss has no GPU version of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

#: What a GPU search gives for a query at most.
MOST = 2048


class OnGpus:
    """A flat or IVF index on all GPUs; called with queries, gives scores, rows and vectors.

    Raises:
        ValueError: this faiss cannot, or sees no GPU, or not this kind of index.
    """

    #: How far a score in fp16 may lie from the exact one.
    noise = 2e-3

    def __init__(self, index: Any, path: Path) -> None:
        if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
            raise ValueError(
                f"--faiss-gpu: faiss {faiss.__version__} as installed searches on no GPU here; "
                "install faiss-gpu instead of faiss-cpu, or leave the flag out"
            )
        if isinstance(index, faiss.IndexHNSW):
            raise ValueError(f"--faiss-gpu: {path} is an HNSW index, which faiss has on CPUs only")
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        try:
            self._gpus = faiss.index_cpu_to_all_gpus(index, options)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--faiss-gpu: {path} cannot be put on the GPUs ({reason})") from None
        if isinstance(index, faiss.IndexIVF):
            index.make_direct_map()  # by which its vectors are found
        self._index = index

    def __call__(
        self, queries_QD: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scores, rows = self._gpus.search(queries_QD, min(count, MOST))
        known = np.where(rows < 0, 0, rows)
        vectors = self._index.reconstruct_batch(known.ravel())
        return scores, rows, vectors.reshape(*rows.shape, -1)
