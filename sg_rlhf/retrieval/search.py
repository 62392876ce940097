"""An opened index: queries in, passages with scores out. Stateless, so replicas need no talk."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.corpus import Corpus, Document, load_offsets, scan

if TYPE_CHECKING:
    from sg_rlhf.retrieval.encoder import Encoder


@dataclass(frozen=True)
class DenseOptions:
    """Options of a search in vectors; the flags of the server.

    Attributes:
        search: `efSearch` or `nprobe`, instead of the index's own.
        encoder_dtype: a key of `encoder.DTYPES`, or `auto`.
        device: of a flat search: cpu, cuda, or cuda:N.
        prompts: of an encoder whose files name none, for a faiss file without a manifest.
    """

    search: Mapping[str, int] = field(default_factory=dict)
    encoder_dtype: str = "auto"
    device: str = "cpu"
    prompts: str | None = None

    @property
    def flags(self) -> str:
        """The flags that are set."""
        flags = {
            "--search": " ".join(f"{name}={value}" for name, value in self.search.items()),
            "--encoder-dtype": "" if self.encoder_dtype == "auto" else self.encoder_dtype,
            "--search-device": "" if self.device == "cpu" else self.device,
            "--prompts": self.prompts or "",
        }
        return ", ".join(f"{flag} {value}" for flag, value in flags.items() if value)


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
        blank = [not query.strip() for query in queries]
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
    options: DenseOptions | None = None,
) -> Retriever:
    """Open a folder made by `python -m sg_rlhf.retrieval.index`.

    Args:
        corpus: where the corpus is now, if it moved.
        encoder: where the encoder is now, if it moved.
        device: of the encoder.
        verify: first check every byte of index and corpus.
        options: of a dense index.

    Raises:
        ValueError: folder, corpus or encoder do not belong together (names both), or a file is not
            as it was built.
    """
    facts = manifest.verify(folder, corpus) if verify else manifest.read(folder)
    path = manifest.check_corpus(folder, facts["corpus"], corpus)
    passages = Corpus(path, load_offsets(folder / manifest.OFFSETS, facts["corpus"]["rows"]))
    options = options or DenseOptions()
    backend: Backend
    if facts["kind"] == "bm25":
        if encoder not in (None, "bm25"):
            raise ValueError(f"--encoder {encoder}: index {folder} is a BM25 index, without one")
        if options != DenseOptions():
            raise ValueError(f"--index {folder}: a BM25 index, without options: {options.flags}")
        backend, name = _open_bm25(folder, facts["encoder"]), "BM25"
    else:
        model = _open_encoder(folder, facts["encoder"], encoder, device, options)
        backend = _open_vectors(folder / manifest.FAISS, model, options, facts.get("search", {}))
        name = f"{facts['kind']} index, encoder {facts['encoder']['model']}"
    if len(backend) != len(passages):
        raise ValueError(
            f"--index {folder}: {len(backend):,} entries for {len(passages):,} passages; "
            "build the index again"
        )
    return Retriever(backend, passages, f"{len(passages):,} passages of {path}, {name}")


def _open_bm25(folder: Path, expected: Mapping[str, Any]) -> Backend:
    # numba takes seconds to import, and dense indexes do not need it.
    from sg_rlhf.retrieval import bm25

    if expected.get("revision") != bm25.IDENTITY["revision"]:
        raise ValueError(
            f"--index {folder}: its words were split in another way ({expected.get('revision')}; "
            f"this version: {bm25.IDENTITY['revision']}); build the index again"
        )
    try:
        return bm25.BM25Backend(folder / manifest.BM25)
    except Exception as error:
        # bm25s trusts its files: their content decides how it fails.
        raise ValueError(
            f"{folder / manifest.BM25}: cannot be read ({type(error).__name__}: {error}); build "
            "the index again"
        ) from None


def _open_encoder(
    folder: Path,
    expected: dict[str, Any],
    encoder: str | None,
    device: str | None,
    options: DenseOptions,
) -> Encoder:
    from sg_rlhf.retrieval.encoder import Encoder

    where = encoder or expected["model"]
    if encoder is None and "path" in expected:
        where = os.path.normpath(folder.resolve() / expected["path"])
    # Otherwise transformers would read the path of a missing folder as a model id.
    if "path" in expected and not Path(where).is_dir():
        raise ValueError(
            f"--index {folder}: its encoder {where} is not there (--encoder says where it is)"
        )
    if options.prompts:
        raise ValueError(
            f"--prompts {options.prompts}: index {folder} has the prompts of its build"
        )
    revision, max_length = expected.get("revision"), expected["max_length"]
    prompts = manifest.prompts_of(expected)
    model = Encoder(where, revision, max_length, device, options.encoder_dtype, prompts)
    manifest.check_encoder(folder, expected, model.identity)
    return model


def _open_vectors(
    file: Path, model: Encoder, options: DenseOptions, search: Mapping[str, int] | None = None
) -> Backend:
    """Search in a faiss file; prints each raised search parameter on stderr."""
    from sg_rlhf.retrieval import dense

    given = {**(search or {}), **options.search}
    backend = dense.DenseBackend(file, model, given, options.device)
    for line in backend.adjusted:
        print(line, file=sys.stderr, flush=True)
    return backend


def open_faiss(
    index: Path,
    corpus: Path,
    encoder: str,
    max_length: int = 256,
    device: str | None = None,
    options: DenseOptions | None = None,
) -> Retriever:
    """Open a plain faiss file and its corpus, such as Search-R1's `e5_Flat.index` and wiki-18.

    There is no manifest: the number of passages and the dimension must agree; that it is the right
    encoder is not checked.

    Raises:
        ValueError: the files do not fit together.
    """
    from sg_rlhf.retrieval.encoder import Encoder

    options = options or DenseOptions()
    for flag, path in (("--faiss-index", index), ("--corpus", corpus)):
        if not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
    model = Encoder(encoder, None, max_length, device, options.encoder_dtype, options.prompts)
    backend = _open_vectors(index, model, options)
    passages = Corpus(corpus, scan(corpus, check=False).offsets)
    if len(backend) != len(passages):
        raise ValueError(
            f"--faiss-index {index} has {len(backend):,} vectors, --corpus {corpus} has "
            f"{len(passages):,} passages; expected as many"
        )
    passages.document(0)  # a corpus of another format is found now, not in the first answer
    description = f"{len(passages):,} passages of {corpus}, {index.name}, encoder {encoder}"
    return Retriever(backend, passages, description)
