"""Open a faiss index file: map it, check it, and set search parameters with a usable recall.

A file has faiss's default search parameters where nobody set any: `efSearch` 16 and `nprobe` 1.
With these HNSW misses many of the nearest passages, and IVF most. So an opened file gets at least

    efSearch   128
    nprobe     a quarter of its lists, at most 256, if the file says 1

and each raised value is printed. `--search NAME=VALUE` sets them explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

#: Smallest efSearch unless another is given, and the largest: faiss counts in 32 bits.
EF_SEARCH, MAX_EF_SEARCH = 128, 2**20
#: The default nprobe is a quarter of the lists, at most this many.
MAX_NPROBE = 256


def read(path: Path, dimension: int) -> Any:
    """The index in a file, with its arrays memory-mapped.

    Args:
        dimension: of the encoder's vectors.

    Raises:
        ValueError: if it is no inner-product index of such vectors that gives them back.
    """
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
    _check_vectors(path, index)
    return index


def set_search(
    index: Any, given: Mapping[str, int], where: str
) -> tuple[dict[str, int], list[str]]:
    """Set the search parameters of an index: the given ones, and usable values for the others.

    Args:
        given: by `--search`, or by the manifest of an index.
        where: the index's name, for messages.

    Returns:
        what it searches with, and a line for each value that was raised.

    Raises:
        ValueError: for a parameter that this index has not, or a value that it cannot have.
    """
    holders = dict(_tunable_parts(index))
    used, lines = {}, []
    for name, value in given.items():
        if name not in holders:
            has = f"has {', '.join(holders)}" if holders else "has no search parameters"
            raise ValueError(f"--search {name}={value}: {where} {has}")
    for name, holder in holders.items():
        stored = int(getattr(holder, name))
        most = int(holder.nlist) if name == "nprobe" else MAX_EF_SEARCH
        value = given.get(name, _usable(name, stored, most))
        if not 1 <= value <= most:
            raise ValueError(f"--search {name}={value}: {where} takes 1 to {most}")
        if name not in given and value != stored:
            lines.append(
                f"{where}: {name} {value}, where the file says {stored} "
                f"(--search {name}=N sets another)"
            )
        setattr(holder, name, value)
        used[name] = value
    return used, lines


def _usable(name: str, stored: int, lists: int) -> int:
    if name == "efSearch":
        return max(stored, EF_SEARCH)
    return max(1, min(lists // 4, MAX_NPROBE)) if stored == 1 else min(stored, lists)


def _tunable_parts(index: Any) -> Iterator[tuple[str, Any]]:
    """The search parameters that an index has, each with the object that holds it."""
    for part in _parts(index):
        if isinstance(part, faiss.IndexHNSW):
            yield "efSearch", part.hnsw
        elif isinstance(part, faiss.IndexIVF):
            yield "nprobe", part


def _parts(index: Any) -> Iterator[Any]:
    """An index, and what it is wrapped around."""
    while True:
        index = faiss.downcast_index(index)
        yield index
        if isinstance(index, faiss.IndexPreTransform | faiss.IndexIDMap):
            index = index.index
        elif isinstance(index, faiss.IndexRefine):
            index = index.base_index
        else:
            return


def _check_vectors(path: Path, index: Any) -> None:
    """Whether the vectors can be had back, and their numbers are the rows of a corpus."""
    if not index.ntotal:
        raise ValueError(f"{path}: no vectors in it")
    for part in _parts(index):
        if isinstance(part, faiss.IndexIDMap):
            ids = faiss.vector_to_array(part.id_map)
            if not np.array_equal(ids, np.arange(len(ids))):
                raise ValueError(
                    f"{path}: vectors with ids of their own; expected the passages' rows, 0 to "
                    f"{len(ids) - 1}, in order"
                )
    try:
        if flat_vectors(index) is not None:
            index.reconstruct(0)  # a search would read the whole file
        else:
            index.search_and_reconstruct(np.zeros((1, index.d), np.float32), 1)
    except RuntimeError:
        raise ValueError(
            f"{path}: a {type(index).__name__}, which does not give its vectors back; "
            "expected a flat, HNSW or IVF index"
        ) from None


def flat_vectors(index: Any) -> torch.Tensor | None:
    """The vectors of a flat index, [rows, dimension], float32 or float16, mapped from its file.

    None if the index is not flat, or its vectors have another type.
    """
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
