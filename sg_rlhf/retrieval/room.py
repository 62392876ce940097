"""What a build will take, said before it begins, and refused where the machine has not got it.

Sizes follow from the formats (`common.index_sizes`). The time of the vectors is measured on
passages of the corpus itself; that of lists on a product of matrices; that of a graph is a guess,
which no measurement at that size stands behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.common import index_sizes, resources
from sg_rlhf.common.index_sizes import KINDS, PRECISIONS, TRAIN_PER_LIST, Spec
from sg_rlhf.common.resources import MANY, Requirements
from sg_rlhf.common.text import format_bytes, format_seconds
from sg_rlhf.retrieval.analysis import ANALYSES, LUCENE
from sg_rlhf.retrieval.corpus import Corpus
from sg_rlhf.retrieval.job import DONE, Build
from sg_rlhf.retrieval.postings import SHARD_WORDS

if TYPE_CHECKING:
    from sg_rlhf.retrieval.encoder import Encoder

#: Seconds that a measurement of the encoder should take at least, and its texts at most.
MEASURE_SECONDS, MOST_TEXTS = 2.0, 8192
#: Seconds of one core to put a vector of 768 numbers into a graph of a million, efConstruction 200:
#: a guess. 30,000 vectors of 256 numbers took 1.4 ms each.
HNSW_SECONDS = 5e-3

#: BM25: passages whose words are counted; bytes of memory of a word of the vocabulary, of one in a
#: shard, and of the process. Together 362 MB where 267 were measured, of 100,000 passages.
BM25_SAMPLE = 2000
BM25_VOCABULARY, BM25_SHARD = 300, 100
BM25_PROCESS = 200 * 10**6


def check(job: Build, needs: Requirements, rows: int) -> None:
    """Print what is needed if it is much, and refuse what is not there.

    Raises:
        ValueError: naming what is missing and what to do.
    """
    if rows >= MANY or job.dry_run:
        resources.print_requirements(needs.lines, job.out)
    if not job.skip_room_check:
        resources.check_requirements("--out", job.out, "the build", needs)


def of_vectors(job: Build, spec: Spec, corpus: Corpus, model: Encoder) -> Requirements:
    """Of an index of vectors."""
    from sg_rlhf.retrieval.dense_build import places

    where = places(job)
    there = _on_disk(job)
    disk = index_sizes.build_disk(spec)
    encode = index_sizes.encode_memory(spec, len(where), model.size, job.shard_rows)
    after = index_sizes.assemble_memory(spec, model.size, resources.cores())
    lines = [
        f"{job.corpus}: {spec.rows:,} passages; {spec.kind} index, {spec.dimension} numbers each, "
        f"{_parameters(spec)}",
        f"  disk    {format_bytes(disk)} while it is made"
        + (f", {format_bytes(there)} of them there" if there else "")
        + f"; {format_bytes(index_sizes.finished_disk(spec))} after",
        f"  memory  {format_bytes(encode)} to encode, {format_bytes(after)} to make the "
        f"index; to serve it from memory {format_bytes(spec.index_bytes)}, "
        "less from a fast disk",
    ]
    if spec.rows >= MANY:
        left = spec.rows - min(_done(job) * job.shard_rows, spec.rows)
        rate = _rate(corpus, model, where[0].threads) * len(where)
        made = _assemble_seconds(spec)
        lines.append(
            f"  time    {format_seconds(left / rate)} to encode ({rate:,.0f} passages a second"
            + (f" in {len(where)} processes, if each is as fast as one" if len(where) > 1 else "")
            + "; measured now)"
            + (f", very roughly {format_seconds(made)} to make the index" if made else "")
        )
    instead = _instead(job, spec, model, len(where))
    return Requirements(max(0, disk - there), max(encode, after), tuple(lines), instead)


def of_bm25(job: Build, corpus: Corpus) -> Requirements:
    """Of an index of words, from those of some passages spread over the corpus."""
    analysis = ANALYSES[job.analysis or LUCENE.name]
    rows = _spread(len(corpus), BM25_SAMPLE)
    start = time.perf_counter()
    found = [analysis.words(corpus.document(row)["contents"]) for row in rows]
    seconds = (time.perf_counter() - start) / len(rows) * len(corpus)
    words = sum(len(some) for some in found) / len(rows)
    different = round(len(corpus) * sum(len(set(some)) for some in found) / len(rows))
    vocabulary = _vocabulary(found, len(corpus))
    memory = BM25_PROCESS + BM25_VOCABULARY * vocabulary + BM25_SHARD * SHARD_WORDS
    # 4 bytes for a score and for its passage; of the corpus as words for word and count.
    index = 8 * different + 8 * len(corpus) + 40 * vocabulary
    there = _on_disk(job)
    lines = (
        f"{job.corpus}: {len(corpus):,} passages; bm25, about {words:.0f} words each",
        f"  disk    {format_bytes(2 * index)} while it is made"
        + (f", {format_bytes(there)} of them there" if there else "")
        + f"; {format_bytes(index)} after",
        f"  memory  {format_bytes(memory)} to build; faster with {format_bytes(index)} more "
        "for what is mapped of the index",
        f"  time    {format_seconds(1.25 * seconds)} to split words (measured now) and to "
        "score them; a killed build goes on where it was",
    )
    return Requirements(max(0, 2 * index - there), memory, lines)


def _vocabulary(found: Sequence[Sequence[str]], rows: int) -> int:
    """How many different words `rows` passages have, from those of some, at most.

    By Heaps' law, rows ** b of them; b is that between a half and the whole of the sample, and
    grows smaller as a corpus grows.
    """
    half = set().union(*found[: len(found) // 2])
    whole = half.union(*found)
    if not half or len(found) == rows:
        return len(whole)
    power = math.log(len(whole) / len(half)) / math.log(len(found) / (len(found) // 2))
    return round(len(whole) * (rows / len(found)) ** power)


def _parameters(spec: Spec) -> str:
    given = {**spec.build, **spec.search}
    return " ".join([spec.vectors, *(f"{name}={value}" for name, value in given.items())])


def _rate(corpus: Corpus, model: Encoder, threads: int | None) -> float:
    """Passages a second that one process encodes, of passages spread over the corpus."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        count = 32
        while True:
            texts = [corpus.document(row)["contents"] for row in _spread(len(corpus), count)]
            start = time.perf_counter()
            model.encode(texts, "passage")
            seconds = time.perf_counter() - start
            # The first one pays for what is set up once.
            if count > 32 and (seconds > MEASURE_SECONDS / 2 or count >= MOST_TEXTS):
                return len(texts) / seconds
            count = min(MOST_TEXTS, 2 * max(count, int(count * MEASURE_SECONDS / seconds / 2)))
    finally:
        torch.set_num_threads(before)


def _assemble_seconds(spec: Spec) -> float:
    """To make the index of the vectors; 0 where that is a copy."""
    import torch

    from sg_rlhf.retrieval.kmeans import PASSES

    cores = torch.get_num_threads()
    if spec.kind == "hnsw":
        deeper = math.log(max(spec.rows, 2)) / math.log(1e6)
        wider = spec.dimension / 768 * spec.build["efConstruction"] / 200
        return spec.rows * HNSW_SECONDS * deeper * wider / cores
    if not spec.kind.startswith("ivf"):
        return 0.0
    lists = spec.build["nlist"]
    learning = min(spec.rows, lists * TRAIN_PER_LIST) * PASSES
    vectors, centres = torch.rand(1024, spec.dimension), torch.rand(2048, spec.dimension)
    vectors @ centres.T
    start = time.perf_counter()
    vectors @ centres.T
    a_pair = (time.perf_counter() - start) / (1024 * 2048)
    return (learning + spec.rows) * lists * a_pair


def _of_build(job: Build, spec: Spec, model: Encoder, workers: int) -> Requirements:
    memory = index_sizes.build_memory(spec, model.size, workers, job.shard_rows, resources.cores())
    return Requirements(index_sizes.build_disk(spec), memory)


def _instead(job: Build, spec: Spec, model: Encoder, workers: int) -> str:
    """Other kinds of the same passages that this machine holds."""
    fit = []
    for kind in KINDS:
        for numbers in PRECISIONS:
            other = index_sizes.spec(kind, spec.rows, spec.dimension, numbers)
            if resources.shortage(job.out, _of_build(job, other, model, workers)) is None:
                fit.append(f"--type {kind} --vectors {numbers}")
                break
    return f"; {', '.join(fit)} would do" if fit else ""


def _spread(rows: int, count: int) -> range:
    """About `count` rows from the first to the last."""
    return range(0, rows, max(1, rows // count))[:count]


def _on_disk(job: Build) -> int:
    """Bytes that an unfinished build has on the disk."""
    if not job.partial.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in job.partial.rglob("*") if path.is_file())


def _done(job: Build) -> int:
    """Chunks that an unfinished build has."""
    file: Path = job.partial / DONE
    return file.read_bytes().count(1) if file.exists() else 0
