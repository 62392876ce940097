"""Build a dense index: encode the corpus in shards, then `faiss.index_factory`, train, add.

A shard is one `.npy` file, float32 [rows, dimension], written atomically, so a finished one is not
encoded again. Several devices, or `--workers`, encode in a process pool, one process per device.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from tqdm import tqdm

from sg_rlhf.common import resources
from sg_rlhf.common.atomic_io import disk_full_context, write_whole
from sg_rlhf.retrieval import faiss_file
from sg_rlhf.retrieval.corpus import Corpus, load_offsets
from sg_rlhf.retrieval.encoder import Encoder

#: Vectors that faiss trains on: per list of an IVF index, and at least.
TRAIN_PER_LIST, MIN_TRAIN = 64, 65_536
#: faiss's default of 40 loses recall at every `efSearch`.
EF_CONSTRUCTION = 200


@dataclass(frozen=True)
class Shards:
    """The encoded corpus in a folder: one file per `shard_rows` passages.

    All processes of a build share it; paths are absolute. `load_encoder` takes a device.
    """

    folder: Path
    corpus: Path
    offsets: Path
    rows: int
    shard_rows: int
    load_encoder: Callable[[str], Encoder]
    batch_size: int | None

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{number:06d}.npy"

    @property
    def missing(self) -> list[int]:
        """The shards that are not encoded yet."""
        count = -(-self.rows // self.shard_rows)
        return [number for number in range(count) if not self.path(number).exists()]

    def encode(self, number: int, encoder: Encoder, corpus: Corpus) -> int:
        """Write a shard; returns its number of rows.

        Raises:
            ValueError: a vector is not finite: no search would find its passage.
        """
        start = number * self.shard_rows
        texts = corpus.contents(range(start, min(start + self.shard_rows, self.rows)))
        vectors_ND = encoder.encode(texts, "passage", self.batch_size)
        bad = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
        if len(bad):
            raise ValueError(
                f"{self.corpus}: the encoder {encoder.name} gives NaN or infinity for the passage "
                f"in line {start + int(bad[0]) + 1}; its weights are damaged, or too large for "
                f"{encoder.dtype}: --encoder-dtype fp32"
            )
        content = io.BytesIO()
        np.save(content, vectors_ND)
        write_whole(self.path(number), content.getvalue(), sync=True)
        return len(texts)

    def blocks(self) -> Iterator[np.ndarray]:
        """The vectors of each shard, memory-mapped, in order."""
        for number in range(-(-self.rows // self.shard_rows)):
            yield np.load(self.path(number), mmap_mode="r")

    def open_corpus(self) -> Corpus:
        """The passages."""
        return Corpus(self.corpus, load_offsets(self.offsets, self.rows))


def devices(device: str | None) -> list[str]:
    """The devices to encode on: those of `--device`, or every GPU, or the CPU."""
    if device:
        return device.split(",")
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def places(names: Sequence[str], workers: int | None) -> list[tuple[str, int | None]]:
    """(device, threads) of each encoding process; threads None: torch's own choice.

    One process per GPU, or one for 8 cores of a CPU; `workers` sets another number per device.
    """
    if names[0] != "cpu":
        return [(name, None) for name in names for _ in range(workers or 1)]
    cores = resources.cores()
    count = workers or max(1, cores // 8)
    return [("cpu", max(1, cores // count) if count > 1 else None)] * count


def encode(
    shards: Shards,
    where: Sequence[tuple[str, int | None]],
    encoder: Encoder,
    on_rows: Callable[[int], object],
) -> None:
    """Encode the missing shards; `on_rows` gets the rows of each finished one.

    Args:
        encoder: of this process, which encodes alone if `where` is one place.

    Raises:
        ValueError: a worker process ended, or a vector is not finite.
    """
    missing = shards.missing
    if len(where) == 1:
        corpus = shards.open_corpus()
        for number in missing:
            on_rows(shards.encode(number, encoder, corpus))
        return
    spawned = multiprocessing.get_context("spawn")
    turn = spawned.Queue()
    for place in where:
        turn.put(place)
    try:
        with ProcessPoolExecutor(len(where), spawned, _start_worker, (shards, turn)) as pool:
            for rows in pool.map(_encode_in_worker, missing):
                on_rows(rows)
    except BrokenProcessPool:
        raise ValueError(
            f"a process that encodes was killed, {len(shards.missing)} shards are missing; the "
            "same command continues with them"
        ) from None


_worker: Callable[[int], int]


def _start_worker(shards: Shards, turn: Any) -> None:
    global _worker
    # Without this a worker outlives a parent that was killed.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    device, threads = turn.get()
    if threads is not None:
        torch.set_num_threads(threads)
    encoder, corpus = shards.load_encoder(device), shards.open_corpus()
    _worker = lambda number: shards.encode(number, encoder, corpus)  # noqa: E731


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _encode_in_worker(number: int) -> int:
    return _worker(number)


# ---------------------------------------------------------------------------------- the faiss index


def new_index(
    factory: str, dimension: int, search: Mapping[str, int]
) -> tuple[Any, dict[str, int]]:
    """An empty inner-product index, and the search parameters that are set in it.

    Args:
        factory: faiss's description, as "Flat", "IVF16384,SQ8", "HNSW32"
            (https://github.com/facebookresearch/faiss/wiki/The-index-factory).
        search: `nprobe`, `efSearch`; defaults are `faiss_file.set_search`'s.

    Raises:
        ValueError: faiss knows no such index of this dimension, or it has no such parameter.
    """
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"--factory {factory}: {reason}") from None
    # A view: `index` owns the memory.
    if isinstance(graph := faiss.downcast_index(index), faiss.IndexHNSW):
        graph.hnsw.efConstruction = EF_CONSTRUCTION
    used, _ = faiss_file.set_search(index, search, f"--factory {factory}")
    return index, used


def fill_index(index: Any, factory: str, shards: Shards, out: Path) -> None:
    """Train an index on a sample, add all vectors, and write it to `out`.

    Raises:
        ValueError: there are too few vectors to train on.
        OSError: the disk is full.
    """
    with tqdm(total=shards.rows, desc="indexing", unit="vector", disable=None) as bar:
        try:
            if not index.is_trained:
                index.train(_sample(index, shards))
            for block in shards.blocks():
                index.add(np.ascontiguousarray(block))
                bar.update(len(block))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--factory {factory}: {shards.rows} vectors: {reason}") from None
    with disk_full_context(out):
        faiss.write_index(index, os.fspath(out))


def _sample(index: Any, shards: Shards) -> np.ndarray:
    """Vectors to train on, float32 [n, dimension], drawn evenly with seed 0."""
    ivf = faiss.try_extract_index_ivf(index)
    wanted = max(MIN_TRAIN, TRAIN_PER_LIST * (ivf.nlist if ivf else 0))
    if wanted >= shards.rows:
        return np.concatenate(list(shards.blocks()))
    chosen = np.sort(np.random.default_rng(0).choice(shards.rows, wanted, replace=False))
    starts = itertools.count(0, shards.shard_rows)
    return np.concatenate(
        [
            block[chosen[(chosen >= start) & (chosen < start + len(block))] - start]
            for start, block in zip(starts, shards.blocks(), strict=False)
        ]
    )
