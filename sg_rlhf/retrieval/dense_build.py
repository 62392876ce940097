"""The part of a build that makes vectors, an index of them, and its recall; resumed if killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.index_sizes import Spec
from sg_rlhf.retrieval import assemble, encoding, manifest, recall, unfinished
from sg_rlhf.retrieval.corpus import Corpus, Scan, load_offsets
from sg_rlhf.retrieval.encoder import Encoder
from sg_rlhf.retrieval.job import DONE, PARTS, SPEC, VECTORS, Build

#: What the workers say, in a folder of an unfinished build.
LOGS = "workers"


def devices(job: Build) -> list[str]:
    """The devices to encode on: those asked for, or every GPU, or the CPU."""
    if job.device:
        return job.device.split(",")
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def load_encoder(job: Build) -> Encoder:
    """The encoder, on the first device."""
    device = devices(job)[0]
    return Encoder(job.encoder, job.revision, job.max_length, device, job.encoder_dtype)


def encoder_entry(job: Build, model: Encoder) -> dict[str, Any]:
    """The manifest's part about the encoder; `path` is where a local one lies from `out`."""
    entry = {**model.identity, "max_length": job.max_length, "dtype": model.dtype}
    if Path(job.encoder).is_dir():
        entry["path"] = os.path.relpath(Path(job.encoder).resolve(), job.out.resolve())
    return entry


def build(
    job: Build, spec: Spec, model: Encoder, found: Scan, request: dict[str, Any], lock: IO[Any]
) -> dict[str, Any]:
    """Everything but the manifest, in `job.partial`; gives the manifest's entry `recall`.

    Raises:
        ValueError: an unfinished build of something else is there, or all workers died.
        OSError: the disk is full.
    """
    what = {"vectors": spec.vectors, "shard_rows": job.shard_rows}
    unfinished.plan(job, found, request, what)
    vectors = _encode(job, spec, model, lock)
    with contextlib.closing(vectors):
        _assemble(job, spec, vectors)
        if spec.kind == "flat":
            return {}
        corpus = Corpus(job.corpus, load_offsets(job.partial / manifest.OFFSETS))
        queries = model.encode(recall.queries(corpus), "query")
        file = job.partial / manifest.FAISS
        return {"recall": recall.measure(spec, file, vectors, queries, model)}


def _encode(job: Build, spec: Spec, model: Encoder, lock: IO[Any]) -> encoding.VectorFile:
    """All passages as vectors, those of an interrupted build used again."""
    path, index = job.partial / VECTORS, job.partial / manifest.FAISS
    if not path.exists() and (job.partial / DONE).exists() and index.exists():
        index.rename(path)  # a flat index is the vectors
    fresh = not path.exists()
    if fresh:
        (job.partial / DONE).unlink(missing_ok=True)
    task = encoding.Task(
        corpus=os.fspath(job.corpus.absolute()),
        offsets=os.fspath((job.partial / manifest.OFFSETS).absolute()),
        vectors=os.fspath(path.absolute()),
        precision=spec.vectors,
        rows=spec.rows,
        dimension=spec.dimension,
        chunk_rows=job.shard_rows,
        encoder=os.path.abspath(job.encoder) if Path(job.encoder).is_dir() else job.encoder,
        revision=job.revision,
        max_length=job.max_length,
        dtype=model.dtype,
        batch_size=job.batch_size,
    )
    vectors = task.file()
    if fresh:
        vectors.create()
    chunks = -(-spec.rows // job.shard_rows)
    done = encoding.Done(job.partial / DONE, chunks)
    if done.count:
        print(f"{job.partial}: going on after {done.count} of {chunks} shards", flush=True)
    ready = min(done.count * job.shard_rows, spec.rows)
    with tqdm(
        total=spec.rows, initial=ready, desc="encoding", unit="passage",
        disable=None if job.progress else True,
    ) as bar:  # fmt: skip
        encoding.encode(task, places(job), done, model, bar.update, lock, job.partial / LOGS)
    return vectors


def places(job: Build) -> list[encoding.Place]:
    """Where each worker computes."""
    return encoding.places(devices(job), job.workers)


def _assemble(job: Build, spec: Spec, vectors: encoding.VectorFile) -> None:
    """The index of the vectors, unless it is there; what was begun of another kind is removed."""
    file, spec_file = job.partial / manifest.FAISS, job.partial / SPEC
    text = json.dumps(asdict(spec), indent=2, sort_keys=True)
    if not (spec_file.exists() and spec_file.read_text(encoding="utf-8") == text):
        _remove([file, *(job.partial / name for name in PARTS)])
        write_whole(spec_file, text)
    if not file.exists():
        assemble.assemble(spec, vectors, file, progress=job.progress)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
