"""Open a faiss index file: map it, check it, and set search parameters with a usable recall.

A file has faiss's default search parameters where nobody set any: `efSearch` 16 and `nprobe` 1.
With these HNSW misses many of the nearest passages, and IVF most, so they are raised.
`--search NAME=VALUE` sets them explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

#: Smallest efSearch unless another is given.
EF_SEARCH = 128
#: The default nprobe is a quarter of the lists, at most this many.
MAX_NPROBE = 256


def read(path: Path, dimension: int) -> Any:
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
    """Set the given search parameters, and usable values of the others; returns them all.

    Raises:
        ValueError: the index has no such parameter.
    """
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
