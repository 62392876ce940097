"""An opened index: queries in, passages with scores out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.corpus import Corpus, Document, scan

if TYPE_CHECKING:
    from sg_rlhf.retrieval.bm25 import BM25Backend
    from sg_rlhf.retrieval.dense import DenseBackend
    from sg_rlhf.retrieval.encoder import Encoder

    Backend = BM25Backend | DenseBackend


@dataclass(frozen=True)
class DenseOptions:
    """Options of a search in vectors; flags of the server."""

    search: Mapping[str, int] = field(default_factory=dict)
    encoder_dtype: str = "auto"
    device: str = "cpu"
    prompts: str | None = None


DEFAULTS = DenseOptions()


@dataclass(frozen=True)
class Hit:
    """A passage found, with its score: BM25, or a cosine."""

    document: Document
    score: float


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
        found = iter(self._backend.search([query for query in queries if query.strip()], topk))
        return [self._hits(*next(found)) if query.strip() else [] for query in queries]

    def _hits(self, rows: np.ndarray, scores: np.ndarray) -> list[Hit]:
        pairs = zip(rows.tolist(), scores.tolist(), strict=True)
        return [Hit(self._corpus.document(row), score) for row, score in pairs]


def open_index(
    folder: Path,
    corpus: Path | None = None,
    encoder: str | None = None,
    device: str | None = None,
    options: DenseOptions = DEFAULTS,
) -> Retriever:
    """Open a folder made by `sg-rlhf index`.

    Args:
        corpus, encoder: where they are now, if they moved.

    Raises:
        ValueError: folder, corpus or encoder do not belong together, or a file is damaged.
    """
    facts = manifest.read(folder)
    path = manifest.check_corpus(folder, facts["corpus"], corpus)
    passages = Corpus(path, np.load(folder / manifest.OFFSETS, mmap_mode="r"))
    backend: Backend
    if facts["kind"] == "bm25":
        if encoder not in (None, "bm25"):
            raise ValueError(f"--encoder {encoder}: index {folder} is a BM25 index, without one")
        if options != DEFAULTS:
            raise ValueError(
                f"--index {folder}: a BM25 index, which takes no --search, --search-device, "
                "--encoder-dtype and --prompts"
            )
        backend, name = _open_bm25(folder, facts["encoder"]), "BM25"
    else:
        model = _open_encoder(folder, facts["encoder"], encoder, device, options)
        # torch takes seconds to import, and BM25 does not need it.
        from sg_rlhf.retrieval.dense import DenseBackend

        backend = DenseBackend(folder / manifest.FAISS, model, options.search, options.device)
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

    path = expected.get("path")
    where = encoder or (os.path.normpath(folder.resolve() / path) if path else expected["model"])
    # Otherwise transformers would read the path of a missing folder as a model id.
    if path and not Path(where).is_dir():
        raise ValueError(
            f"--index {folder}: its encoder {where} is not there (--encoder says where it is)"
        )
    if options.prompts:
        raise ValueError(
            f"--prompts {options.prompts}: index {folder} has the prompts of its build"
        )
    model = Encoder(
        where, expected.get("revision"), expected["max_length"], device, options.encoder_dtype,
        expected.get("prompts"),
    )  # fmt: skip
    found, built_with = _mark(model.identity), _mark(expected)
    if found != built_with:
        raise ValueError(
            f"encoder {model.identity['model']} ({found[:24]}) is not the one that index {folder} "
            f"was built with, {expected['model']} ({built_with[:24]}); pass that one with "
            "--encoder, or build the index again"
        )
    return model


def _mark(encoder: Mapping[str, Any]) -> str:
    """Equal for equal encoders: a folder may have been renamed, a model id may not."""
    return encoder.get("fingerprint") or f"{encoder['model']} {encoder.get('revision')}"


def open_faiss(
    index: Path,
    corpus: Path,
    encoder: str,
    max_length: int = 256,
    device: str | None = None,
    options: DenseOptions = DEFAULTS,
) -> Retriever:
    """Open a plain faiss file and its corpus, such as Search-R1's `e5_Flat.index` and wiki-18."""
    from sg_rlhf.retrieval.dense import DenseBackend
    from sg_rlhf.retrieval.encoder import Encoder

    for flag, path in (("--faiss-index", index), ("--corpus", corpus)):
        if not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
    model = Encoder(encoder, None, max_length, device, options.encoder_dtype, options.prompts)
    backend = DenseBackend(index, model, options.search, options.device)
    passages = Corpus(corpus, scan(corpus, check=False)[0])
    if len(backend) != len(passages):
        raise ValueError(
            f"--faiss-index {index} has {len(backend):,} vectors, --corpus {corpus} has "
            f"{len(passages):,} passages; expected as many"
        )
    passages.document(0)  # a corpus of another format is found now, not in the first answer
    description = f"{len(passages):,} passages of {corpus}, {index.name}, encoder {encoder}"
    return Retriever(backend, passages, description)
