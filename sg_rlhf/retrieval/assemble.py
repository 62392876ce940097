"""A faiss index file from a file of vectors, in bounded memory.

    kind      in memory                              on disk beside the index
    flat      nothing: the file of vectors is the index
    sq8       a sample, and a block
    hnsw      vectors and graph, once                the vectors; the graph every few minutes
    ivf...    a sample, and a block                  the vectors, 4 bytes a vector

Every step that takes long leaves what the next start goes on with: the trained lists, each vector's
list, the graph so far. Files are complete when they have their name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import faiss
import numpy as np
import torch
from tqdm import tqdm

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.common.index_sizes import (
    BLOCK_BYTES,
    CODES_BYTES,
    CODES_SAMPLE,
    LISTS_BLOCK_BYTES,
    SLICE,
    TILE,
    Spec,
)
from sg_rlhf.retrieval import kmeans
from sg_rlhf.retrieval.job import CENTRES, GRAPH, LISTS, SAMPLE, TRAINED
from sg_rlhf.retrieval.scan import Workers
from sg_rlhf.retrieval.vectors import VectorFile, header, with_rows

#: Seconds between two graphs that a killed build can go on from.
CHECKPOINT_SECONDS = 600.0

METRIC = faiss.METRIC_INNER_PRODUCT
_QT = faiss.ScalarQuantizer


def assemble(spec: Spec, vectors: VectorFile, out: Path, *, progress: bool = True) -> None:
    """Make the index file `out`; other files go beside it. The vectors' file is used up by flat."""
    makers: dict[str, Callable[..., None]] = {"flat": _flat, "sq8": _sq8, "hnsw": _hnsw}
    makers.get(spec.kind, _ivf)(spec, vectors, out, progress)


def _flat(spec: Spec, vectors: VectorFile, out: Path, progress: bool) -> None:
    vectors.path.rename(out)


def _sq8(spec: Spec, vectors: VectorFile, out: Path, progress: bool) -> None:
    index = faiss.IndexScalarQuantizer(spec.dimension, _QT.QT_8bit, METRIC)
    index.train(vectors.take(vectors.draw(CODES_SAMPLE)))
    with _written(out) as file, _bar("building sq8", spec.rows, 0, progress) as bar:
        file.write(header(index, spec.rows))
        for _, block in vectors.blocks(_rows_a_block(spec)):
            file.write(index.sa_encode(block))
            bar.update(len(block))


# ------------------------------------------------------------------------------------------- graph


def _hnsw(spec: Spec, vectors: VectorFile, out: Path, progress: bool) -> None:
    graph = out.with_name(GRAPH)
    index = _graph_so_far(spec, vectors, graph)
    saved = time.monotonic()
    with _bar("building hnsw", spec.rows, index.ntotal, progress) as bar:
        for _, block in vectors.blocks(_rows_a_block(spec), index.ntotal):
            index.add(block)
            bar.update(len(block))
            if time.monotonic() - saved > CHECKPOINT_SECONDS and index.ntotal < spec.rows:
                _save(index, graph, faiss.IO_FLAG_SKIP_STORAGE)
                saved = time.monotonic()
    index.hnsw.efSearch = spec.search["efSearch"]
    # faiss would write the vectors too, and they are a file already: an index's bytes end with
    # those of its vectors, or with four letters where they were left out.
    _save(index, graph, faiss.IO_FLAG_SKIP_STORAGE)
    del index
    with _written(out) as file, graph.open("rb") as links, vectors.path.open("rb") as codes:
        shutil.copyfileobj(links, file, 2**24)
        file.seek(-4, os.SEEK_CUR)
        shutil.copyfileobj(codes, file, 2**24)


def _graph_so_far(spec: Spec, vectors: VectorFile, graph: Path) -> Any:
    """The index with what a killed build had of it, and room for the rest."""
    links = spec.build["M"]
    if spec.vectors == "fp32":
        whole = faiss.IndexHNSWFlat(spec.dimension, links, METRIC)
    else:
        whole = faiss.IndexHNSWSQ(spec.dimension, _QT.QT_fp16, links, METRIC)
        whole.is_trained = True  # fp16 has nothing to learn
    storage = faiss.downcast_index(whole.storage)
    if graph.exists():
        done = faiss.read_index(os.fspath(graph))
        whole.hnsw, whole.ntotal = done.hnsw, done.ntotal
        del done
    whole.hnsw.efConstruction = spec.build["efConstruction"]
    # Vectors of C++ double when they grow: each gets its final room first, and then its old size.
    levels = faiss.HNSW(links)
    levels.prepare_level_tab(spec.rows)
    needed, had = levels.offsets.at(spec.rows), whole.hnsw.neighbors.size()
    del levels
    whole.hnsw.neighbors.resize(needed)
    whole.hnsw.neighbors.resize(had)
    storage.codes.resize(spec.rows * storage.code_size)
    storage.codes.resize(0)
    if whole.ntotal:
        # The levels that are drawn next are those that an undisturbed build would draw.
        before = faiss.HNSW(links)
        before.prepare_level_tab(whole.ntotal)
        whole.hnsw.rng = before.rng
        del before
        for start, block in vectors.blocks(_rows_a_block(spec)):
            storage.add(block[: whole.ntotal - start])
            if storage.ntotal == whole.ntotal:
                break
    return whole


def _save(index: Any, path: Path, flags: int = 0) -> None:
    """Write an index so that `path` never is half of one."""
    temporary = path.with_suffix(".tmp")
    with disk_full_context(path):
        try:
            faiss.write_index(index, os.fspath(temporary), flags)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise OSError(f"{path}: cannot be written ({reason})") from None
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)


# ------------------------------------------------------------------------------------------- lists


def _ivf(spec: Spec, vectors: VectorFile, out: Path, progress: bool) -> None:
    trained = out.with_name(TRAINED)
    with Workers() as workers:
        if not trained.exists():
            _save(_trained(spec, vectors, workers, out, progress), trained)
            for name in (SAMPLE, CENTRES):
                out.with_name(name).unlink(missing_ok=True)
        index = faiss.read_index(os.fspath(trained))
        index.nprobe = spec.search["nprobe"]
        lists = _assign(spec, index, vectors, workers, out.with_name(LISTS), progress)
    _fill(spec, index, vectors, lists, out, progress)


def _trained(spec: Spec, vectors: VectorFile, workers: Workers, out: Path, progress: bool) -> Any:
    """An index that has learnt as by `index.train`, which would hold what it learns from."""
    index = _empty_ivf(spec)
    sample = _sample(spec, vectors, out.with_name(SAMPLE))
    with (
        contextlib.closing(sample),
        _bar("learning lists", kmeans.PASSES * sample.rows, 0, progress) as bar,
    ):
        nlist, state = spec.build["nlist"], out.with_name(CENTRES)
        centres = kmeans.learn(sample, nlist, state, workers, bar.update)
        index.quantizer.train(centres)
        index.quantizer.add(centres)
        if index.train_encoder_num_vectors():
            _train_codes(index, vectors, sample, centres, out.parent)
    index.is_trained = True
    return index


def _sample(spec: Spec, vectors: VectorFile, path: Path) -> VectorFile:
    """What k-means learns from, one behind the other in a file, which is read again and again."""
    if spec.sample_rows == spec.rows:
        return VectorFile(vectors.path, spec.vectors, spec.rows, spec.dimension)
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        file = VectorFile(temporary, spec.vectors, spec.sample_rows, spec.dimension)
        with contextlib.closing(file):
            file.create()
            for start, some in _pieces(vectors.draw(spec.sample_rows), spec.dimension):
                file.write(start, vectors.take(some))
        temporary.rename(path)
    return VectorFile(path, spec.vectors, spec.sample_rows, spec.dimension)


def _train_codes(
    index: Any, vectors: VectorFile, sample: VectorFile, centres_LD: np.ndarray, folder: Path
) -> None:
    """What the numbers of a code mean, from what lists' centres leave of some vectors.

    Of the sample, but a few lists learn from few, and codes need as many as they have values.

    The parts of a product quantizer learn one by one from their columns alone, so these vectors
    are written to a file by columns, and only those of some parts are in memory.
    """
    count = min(index.train_encoder_num_vectors(), CODES_SAMPLE)
    learnt_from = sample if sample.rows >= count else vectors
    rows = learnt_from.draw(count)
    product_quantized = isinstance(index, faiss.IndexIVFPQ)
    part = index.pq.dsub if product_quantized else index.d
    width = part * max(1, CODES_BYTES // (4 * len(rows) * part))
    lists = np.empty(len(rows), np.int64)
    near, product = torch.from_numpy(centres_LD), torch.empty(SLICE * TILE)
    with disk_full_context(folder), TemporaryFile(dir=folder) as file:
        for start in range(0, len(rows), SLICE):
            some = slice(start, start + SLICE)
            block = learnt_from.take(rows[some])
            lists[some] = kmeans.nearest(torch.from_numpy(block), near, product)
            if index.by_residual:
                block -= centres_LD[lists[some]]
            for first in range(0, index.d, width):
                columns = np.ascontiguousarray(block[:, first : first + width])
                _write_at(file, columns, 4 * (first * len(rows) + start * columns.shape[1]))
        file.seek(0)
        centroids = []
        for first in range(0, index.d, width):
            count = min(width, index.d - first)
            columns = np.fromfile(file, np.float32, len(rows) * count).reshape(-1, count)
            if not product_quantized:  # these are all columns
                index.train_encoder(len(rows), faiss.swig_ptr(columns), faiss.swig_ptr(lists))
                return
            parts = faiss.ProductQuantizer(count, count // part, index.pq.nbits)
            parts.train(columns)
            centroids.append(faiss.vector_to_array(parts.centroids))
        faiss.copy_array_to_vector(np.concatenate(centroids), index.pq.centroids)


def _empty_ivf(spec: Spec) -> Any:
    coarse, d, nlist = faiss.IndexFlatIP(spec.dimension), spec.dimension, spec.build["nlist"]
    if spec.kind == "ivfpq":
        index = faiss.IndexIVFPQ(
            coarse, d, nlist, spec.build["pq_m"], spec.build["pq_bits"], METRIC
        )
    elif spec.kind == "ivfsq8":
        index = faiss.IndexIVFScalarQuantizer(coarse, d, nlist, _QT.QT_8bit, METRIC)
    elif spec.vectors == "fp16":
        index = faiss.IndexIVFScalarQuantizer(coarse, d, nlist, _QT.QT_fp16, METRIC, False)
    else:
        index = faiss.IndexIVFFlat(coarse, d, nlist, METRIC)
    index.own_fields = True
    coarse.this.disown()
    return index


def _assign(
    spec: Spec, index: Any, vectors: VectorFile, workers: Workers, path: Path, progress: bool
) -> np.ndarray:
    """Each vector's list, int32 [rows]; kept in a file, where a killed build goes on."""
    coarse = faiss.downcast_index(index.quantizer)
    centres = torch.from_numpy(coarse.reconstruct_n(0, index.nlist))
    with disk_full_context(path), path.open("ab+") as file:
        done = os.fstat(file.fileno()).st_size // 4
        # Whole slices, so that those to come are those of a build without a kill.
        done = spec.rows if done == spec.rows else done // SLICE * SLICE
        file.truncate(4 * done)
        with _bar("assigning lists", spec.rows, done, progress) as bar:
            job = partial(_nearest, centres)
            for found in kmeans.each_slice(vectors, workers, job, done):
                file.write(found.astype("<i4").tobytes())
                bar.update(len(found))
    return np.fromfile(path, "<i4")


def _nearest(centres: torch.Tensor, block: torch.Tensor, product: torch.Tensor) -> np.ndarray:
    return kmeans.nearest(block, centres, product)


def _fill(
    spec: Spec, index: Any, vectors: VectorFile, lists: np.ndarray, out: Path, progress: bool
) -> None:
    """Write the index with each code at its place, which follows from the lists' lengths."""
    sizes = np.zeros(index.nlist, np.int64)
    for _, some in _pieces(lists, spec.dimension):  # bincount makes int64 of what it counts
        sizes += np.bincount(some, minlength=index.nlist)
    # After the empty lists that faiss ends an index with: the full ones in the same format.
    empty = b"ilar" + struct.pack("<qq", index.nlist, index.code_size)
    head, found, _ = bytes(faiss.serialize_index(index)).rpartition(empty)
    assert found, "an IVF index without inverted lists"
    head = bytes(with_rows(head, spec.rows)) + empty
    head += b"full" + struct.pack("<q", index.nlist) + sizes.tobytes()
    if spec.kind == "ivfpq":
        # Vectors whose distances to all centroids faiss holds at once; it would be all of a block.
        tables = 4 * spec.build["pq_m"] * 2 ** spec.build["pq_bits"]
        faiss.cvar.product_quantizer_compute_codes_bs = max(1, CODES_BYTES // tables)
    # A list is its codes, then its ids.
    codes_at = len(head) + np.concatenate(([0], np.cumsum(sizes[:-1]))) * (index.code_size + 8)
    ids_at = codes_at + sizes * index.code_size
    with _written(out) as file, _bar("filling lists", spec.rows, 0, progress) as bar:
        file.write(head)
        file.truncate(len(head) + spec.rows * (index.code_size + 8))
        file.flush()
        for start, block in vectors.blocks(max(1024, LISTS_BLOCK_BYTES // (4 * spec.dimension))):
            of = np.ascontiguousarray(lists[start : start + len(block)], np.int64)
            codes = np.empty((len(block), index.code_size), np.uint8)
            index.encode_vectors(
                len(block), faiss.swig_ptr(block), faiss.swig_ptr(of), faiss.swig_ptr(codes)
            )
            order = np.argsort(of, kind="stable")
            codes, rows = codes[order], (order + start).astype("<i8")
            cuts = np.flatnonzero(np.diff(of[order])) + 1
            for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(order)], strict=True):
                which = of[order[first]]
                _write_at(file, codes[first:last], codes_at[which])
                _write_at(file, rows[first:last], ids_at[which])
                codes_at[which] += (last - first) * index.code_size
                ids_at[which] += (last - first) * 8
            bar.update(len(block))


def _write_at(file: Any, data: np.ndarray, position: int) -> None:
    view = data.data.cast("B")
    while view:
        written = os.pwrite(file.fileno(), view, position)
        view, position = view[written:], position + written


# ------------------------------------------------------------------------------------------ shared


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """A file that is on the disk, under its name, when the block ends without an error."""
    temporary = path.with_suffix(".tmp")
    with disk_full_context(path), temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _rows_a_block(spec: Spec) -> int:
    return max(1024, BLOCK_BYTES // (4 * spec.dimension))


def _pieces(rows: np.ndarray, dimension: int) -> Iterator[tuple[int, np.ndarray]]:
    """Some of the rows at a time, and where they start among them."""
    size = max(1024, LISTS_BLOCK_BYTES // (4 * dimension))
    for start in range(0, len(rows), size):
        yield start, rows[start : start + size]


def _bar(what: str, total: int, done: int, progress: bool) -> Any:
    return tqdm(
        total=total, initial=done, desc=what, unit="vector", unit_scale=True,
        disable=None if progress else True,
    )  # fmt: skip
