"""Build a dense index: encode the corpus, then `faiss.index_factory`, train, add.

The vectors are appended to one file, float32 [rows, dimension], so a killed build continues where
it stopped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from tqdm import tqdm

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.retrieval.corpus import Corpus
from sg_rlhf.retrieval.encoder import BATCH, Encoder

#: Forward passes between two writes: a killed build loses as many.
BATCHES = 256
#: Vectors that faiss trains on: per list of an IVF index, and at least.
TRAIN_PER_LIST, MIN_TRAIN = 64, 65_536
#: Vectors that are added at once.
ADDED = 16_384
#: faiss's default of 40 loses recall at every `efSearch`.
EF_CONSTRUCTION = 200


def encoded_rows(file: Path, dimension: int) -> int:
    """The passages whose vectors a file holds."""
    return file.stat().st_size // (4 * dimension) if file.exists() else 0


def encode(file: Path, corpus: Corpus, encoder: Encoder, batch_size: int | None) -> np.ndarray:
    """Append the vectors of the passages that `file` lacks; returns all of them, mapped."""
    rows, done = len(corpus), encoded_rows(file, encoder.dimension)
    block = BATCHES * (batch_size or BATCH[encoder.device.type])
    with (
        disk_full_context(file),
        file.open("ab") as out,
        tqdm(total=rows, initial=done, desc="encoding", unit="passage", disable=None) as bar,
    ):
        out.truncate(4 * done * encoder.dimension)
        for start in range(done, rows, block):
            texts = corpus.contents(range(start, min(start + block, rows)))
            vectors_ND = encoder.encode(texts, "passage", batch_size)
            # No search would find such a passage.
            bad = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
            if len(bad):
                raise ValueError(
                    f"{corpus.path}: the encoder {encoder.name} gives NaN or infinity for the "
                    f"passage in line {start + int(bad[0]) + 1}; its weights are damaged, or too "
                    f"large for {encoder.dtype}: --encoder-dtype fp32"
                )
            out.write(vectors_ND.tobytes())
            out.flush()
            os.fsync(out.fileno())
            bar.update(len(texts))
    return np.memmap(file, np.float32, "r", shape=(rows, encoder.dimension))


def new_index(factory: str, dimension: int) -> Any:
    """An empty inner-product index, by faiss's `index_factory`; ValueError for unknown ones."""
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"--factory {factory}: {reason}") from None
    # A view: `index` owns the memory.
    if isinstance(graph := faiss.downcast_index(index), faiss.IndexHNSW):
        graph.hnsw.efConstruction = EF_CONSTRUCTION
    return index


def fill_index(index: Any, factory: str, vectors_ND: np.ndarray, out: Path) -> None:
    """Train an index on a sample, add all vectors, and write it; ValueError if they are too few."""
    rows = len(vectors_ND)
    try:
        if not index.is_trained:
            index.train(sample(vectors_ND, faiss.try_extract_index_ivf(index)))
        for start in tqdm(range(0, rows, ADDED), desc="indexing", unit="block", disable=None):
            index.add(np.ascontiguousarray(vectors_ND[start : start + ADDED]))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"--factory {factory}: {rows} vectors: {reason}") from None
    with disk_full_context(out):
        faiss.write_index(index, os.fspath(out))


def sample(vectors_ND: np.ndarray, ivf: Any | None) -> np.ndarray:
    """Vectors to train on, float32 [n, dimension], drawn evenly with seed 0."""
    rows = len(vectors_ND)
    wanted = min(rows, max(MIN_TRAIN, TRAIN_PER_LIST * (ivf.nlist if ivf else 0)))
    chosen = np.random.default_rng(0).choice(rows, wanted, replace=False)
    return np.ascontiguousarray(vectors_ND[np.sort(chosen)])
