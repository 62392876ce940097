"""An opened index: queries in, passages with scores out. Stateless, so replicas need no talk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.corpus import Corpus, Document, is_blank, load_offsets, scan

if TYPE_CHECKING:
    from sg_rlhf.retrieval.dense import DenseBackend
    from sg_rlhf.retrieval.encoder import Encoder


@dataclass(frozen=True)
class How:
    """What may be set of a search in vectors; the flags of the server.

    Attributes:
        search: `efSearch` or `nprobe`, over what the index says.
        encoder_dtype: numbers that the encoder computes with, a key of `encoder.DTYPES` or `auto`.
        threads: that share a search; by default as many as torch uses.
        gpus: search on GPUs with faiss.
    """

    search: Mapping[str, int] = field(default_factory=dict)
    encoder_dtype: str = "auto"
    threads: int | None = None
    gpus: bool = False

    @property
    def shown(self) -> str:
        """The flags that are set."""
        flags = {
            "--search": " ".join(f"{name}={value}" for name, value in self.search.items()),
            "--encoder-dtype": "" if self.encoder_dtype == "auto" else self.encoder_dtype,
            "--search-threads": self.threads,
        }
        shown = [f"{flag} {value}" for flag, value in flags.items() if value]
        return ", ".join(shown + ["--faiss-gpu"] * self.gpus)


@dataclass(frozen=True)
class Hit:
    """A passage found, with its score: BM25, or a cosine."""

    document: Document
    score: float


class Backend(Protocol):
    """Finds rows of a corpus."""

    def __len__(self) -> int: ...

    def search(self, queries: Sequence[str], topk: int) -> list[tuple[np.ndarray, np.ndarray]]: ...


class Retriever:
    """A backend together with its corpus; `search` may be called from one thread at a time."""

    def __init__(self, backend: Backend, corpus: Corpus, description: str) -> None:
        self._backend = backend
        self._corpus = corpus
        self.description = description

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query its passages, best first; at most `topk`, none for a blank query.

        A query's result does not depend on the others; equal scores are ordered by row.
        """
        blank = is_blank(queries)
        some = [query for query, empty in zip(queries, blank, strict=True) if not empty]
        found = iter(self._backend.search(some, topk))
        return [[] if empty else self._hits(*next(found)) for empty in blank]

    def _hits(self, rows: np.ndarray, scores: np.ndarray) -> list[Hit]:
        pairs = zip(rows.tolist(), scores.tolist(), strict=True)
        return [Hit(self._corpus.document(row), score) for row, score in pairs]


def open_index(
    folder: Path,
    corpus: Path | None = None,
    encoder: str | None = None,
    device: str | None = None,
    *,
    verify: bool = False,
    how: How | None = None,
) -> Retriever:
    """Open a folder made by `python -m sg_rlhf.retrieval.index`.

    Args:
        corpus: where the corpus is now, if not where it was.
        encoder: where the encoder is now, if not where it was.
        device: of the encoder.
        verify: check every byte of index and corpus first, not what is quick alone.
        how: what may be set of a search in vectors.

    Raises:
        ValueError: if folder, corpus or encoder do not belong together, naming both; or if a file
            is not what was built.
    """
    facts = manifest.verify(folder, corpus) if verify else manifest.read(folder)
    path = manifest.check_corpus(folder, facts["corpus"], corpus)
    passages = Corpus(path, load_offsets(folder / manifest.OFFSETS, facts["corpus"]["rows"]))
    expected = facts["encoder"]
    how = how or How()
    backend: Backend
    if facts["kind"] == "bm25":
        # numba takes seconds to import, and dense indexes need none of it.
        from sg_rlhf.retrieval import lexical
        from sg_rlhf.retrieval.analysis import of_revision

        if encoder not in (None, "bm25"):
            raise ValueError(f"--encoder {encoder}: index {folder} is a BM25 index, without one")
        if how != How():
            raise ValueError(
                f"--index {folder}: a BM25 index, which has nothing to set: {how.shown}"
            )
        analysis = of_revision(expected.get("revision"))
        if analysis is None:
            raise ValueError(
                f"--index {folder}: its words were split in a way that this version does not know "
                f"({expected.get('revision')}); build the index again"
            )
        made = partial(lexical.BM25Backend, analysis=analysis)
        backend = _opened(folder / manifest.BM25, made)
        name = f"BM25, analysis {analysis.name}"
    else:
        from sg_rlhf.retrieval.encoder import Encoder

        where = encoder or expected["model"]
        if encoder is None and "path" in expected:
            where = os.path.normpath(folder.resolve() / expected["path"])
        # Without this transformers takes a folder that is gone for a model id.
        if "path" in expected and not Path(where).is_dir():
            raise ValueError(
                f"--index {folder}: its encoder {where} is not there (--encoder says where it is)"
            )
        model = Encoder(
            where, expected.get("revision"), expected["max_length"], device, how.encoder_dtype
        )
        manifest.check_encoder(folder, expected, model.identity)
        backend = _vectors(folder / manifest.FAISS, model, how, facts.get("search", {}))
        name = f"{facts['kind']} index, encoder {expected['model']}"
    if len(backend) != len(passages):
        raise ValueError(
            f"--index {folder}: {len(backend):,} entries for {len(passages):,} passages; "
            "build the index again"
        )
    return Retriever(backend, passages, f"{len(passages):,} passages of {path}, {name}")


def _opened(folder: Path, backend: Callable[[Path], Backend]) -> Backend:
    """What bm25s reads from its files it trusts, and what they hold decides how it fails."""
    try:
        return backend(folder)
    except Exception as error:
        raise ValueError(
            f"{folder}: cannot be read ({type(error).__name__}: {error}); build the index again"
        ) from None


def _vectors(
    file: Path, model: Encoder, how: How, search: Mapping[str, int] | None = None
) -> DenseBackend:
    """Search in a faiss file; what it had to be told says a line on stderr."""
    from sg_rlhf.retrieval.dense import DenseBackend

    backend = DenseBackend(file, model, {**(search or {}), **how.search}, how.threads, how.gpus)
    for line in backend.raised:
        print(line, file=sys.stderr, flush=True)
    return backend


def open_faiss(
    index: Path,
    corpus: Path,
    encoder: str,
    max_length: int = 256,
    device: str | None = None,
    how: How | None = None,
) -> Retriever:
    """Open a plain faiss file and its corpus, such as Search-R1's `e5_Flat.index` and wiki-18.

    There is no manifest: the number of passages and the length of vectors must agree, that it is
    the right encoder is the caller's word.

    Raises:
        ValueError: if the files do not fit together.
    """
    from sg_rlhf.retrieval.encoder import Encoder

    how = how or How()
    for flag, path in (("--faiss-index", index), ("--corpus", corpus)):
        if not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
    model = Encoder(encoder, None, max_length, device, how.encoder_dtype)
    backend = _vectors(index, model, how)
    passages = Corpus(corpus, scan(corpus, check=False).offsets)
    if len(backend) != len(passages):
        raise ValueError(
            f"--faiss-index {index} has {len(backend):,} vectors, --corpus {corpus} has "
            f"{len(passages):,} passages; expected as many"
        )
    passages.document(0)  # a corpus of another format is found now, not in the first answer
    description = f"{len(passages):,} passages of {corpus}, {index.name}, encoder {encoder}"
    return Retriever(backend, passages, description)
