"""What an index finds of what exact search finds: measured when it is built, kept in its manifest.

The queries are pieces of passages, ten words from somewhere in the text behind the title, encoded
as queries; the truth is the exact search of the vectors that the index was made of. What is
compared are rows, with the search parameters that the index has and with others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sg_rlhf.common.index_sizes import Spec
from sg_rlhf.retrieval import scan
from sg_rlhf.retrieval.corpus import Corpus
from sg_rlhf.retrieval.dense import DenseBackend, QueryEncoder
from sg_rlhf.retrieval.vectors import VectorFile

QUERIES, WORDS, TOPS = 256, 10, (3, 10)
OF = f"{WORDS} words in a row of a passage's text, passages drawn evenly, seed 0"

#: Other values that are tried, so that whoever serves knows what they bring.
TRIED = {"efSearch": (16, 32, 64, 128, 256, 512), "nprobe": (1, 4, 16, 64, 256, 1024)}


def queries(corpus: Corpus, count: int = QUERIES) -> list[str]:
    """Pieces of `count` passages, or of all; the same ones every time."""
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(corpus))[:count] if count < len(corpus) else range(len(corpus))
    made = []
    for row in chosen:
        _, _, text = corpus.document(int(row))["contents"].partition("\n")
        words = text.split()
        start = int(rng.integers(max(1, len(words) - WORDS + 1)))
        made.append(" ".join(words[start : start + WORDS]))
    return [text for text in made if text]


def exact(vectors: VectorFile, queries_QD: np.ndarray, workers: scan.Workers) -> np.ndarray:
    """The rows of the `max(TOPS)` best vectors of each query, read from their file."""

    def block(start: int, stop: int, _: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(vectors.read(start, stop))

    count = min(max(TOPS), vectors.rows)
    return scan.best(block, vectors.rows, queries_QD, count, workers)[1]


def measure(
    spec: Spec, file: Path, vectors: VectorFile, queries_QD: np.ndarray, encoder: QueryEncoder
) -> dict[str, Any]:
    """The manifest's entry: recall and time, with the index's own parameters and with others."""
    with scan.Workers() as workers:
        expected = exact(vectors, queries_QD, workers)
    rows = []
    for parameters in _settings(spec):
        backend = DenseBackend(file, encoder, parameters)
        start = time.perf_counter()
        found = backend.search_vectors(queries_QD, max(TOPS))
        seconds = time.perf_counter() - start
        rows.append(
            {
                **parameters,
                **{f"recall_at_{top}": recall(found, expected, top) for top in TOPS},
                "ms_per_query": round(1e3 * seconds / len(queries_QD), 3),
            }
        )
    return {"queries": len(queries_QD), "of": OF, "measured": rows}


def recall(found: list[tuple[np.ndarray, np.ndarray]], expected: np.ndarray, top: int) -> float:
    """The share of the `top` rows expected of each query that were among the `top` found."""
    top = min(top, expected.shape[1])
    shared = [
        len(np.intersect1d(rows[:top], right[:top])) / top
        for (rows, _), right in zip(found, expected, strict=True)
    ]
    return round(float(np.mean(shared)), 4)


def _settings(spec: Spec) -> Iterator[dict[str, int]]:
    """The index's own parameters first."""
    yield dict(spec.search)
    for name, own in spec.search.items():
        most = spec.build.get("nlist", 2**20) if name == "nprobe" else 2**20
        for value in TRIED[name]:
            if value != own and value <= most:
                yield {name: value}
