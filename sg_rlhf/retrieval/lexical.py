"""BM25 with bm25s: the backend that needs neither a GPU nor a model.

Scores are bm25s's `lucene` variant, precomputed at build time, so a search adds up a few columns of
a sparse matrix. Of equal scores the lower row comes first; a passage that shares no word with the
query is no result, so a list may be shorter than asked. How texts are split into words, and the
parameters that go with it, is an `analysis.Analysis`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import bm25s  # type: ignore[import-untyped]
import numpy as np

from sg_rlhf.common import resources
from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.retrieval import postings
from sg_rlhf.retrieval.analysis import Analysis

#: Candidates beyond topk, among which ties at the boundary are settled.
MARGIN = 32

#: From here on numba is used: it searches 5 times faster and compiles for 9 seconds first.
COMPILE_FROM = 200_000


def build(
    corpus: Path,
    rows: int,
    out: Path,
    analysis: Analysis,
    parts: Path | None = None,
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Index a corpus into the folder `out`; returns the facts for the manifest.

    Args:
        parts: a folder for the corpus as words, which stays there: the next build goes on with it.

    Raises:
        ValueError: no passage has a word.
        OSError: the disk is full.
    """
    if parts is None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent) as folder:
            return build(corpus, rows, out, analysis, Path(folder), progress=progress)
    found = postings.split(corpus, rows, parts, analysis, progress=progress)
    words = len(found.vocabulary)
    if not words:
        shutil.rmtree(parts)
        raise ValueError(f"{corpus}: no words in any passage, nothing to index")
    model = bm25s.BM25(k1=analysis.k1, b=analysis.b, method="lucene")
    model.vocab_dict, model.nonoccurrence_array = found.vocabulary, None
    # The matrix comes after the rest of the folder.
    matrix = dict.fromkeys(("data", "indices", "indptr"), np.empty(0))
    model.scores = {**matrix, "num_docs": rows}
    with disk_full_context(out):
        model.save(out, show_progress=False)
    files = {name: out / f"{name}.csc.index.npy" for name in matrix}
    postings.fill(found, analysis, files, progress=progress)
    return {"words": words}


class BM25Backend:
    """Search in a folder written by `build`; its arrays stay on disk, its vocabulary in memory."""

    def __init__(
        self,
        folder: Path,
        analysis: Analysis,
        backend: Literal["numpy", "numba"] | None = None,
    ) -> None:
        self._analysis = analysis
        self._model = bm25s.BM25.load(folder, mmap=True)
        scores = self._model.scores
        # numba compiles for plain arrays; these views are still backed by the file.
        for name in ("data", "indices", "indptr"):
            scores[name] = np.asarray(scores[name])
        self._rows = int(scores["num_docs"])
        backend = backend or ("numba" if self._rows >= COMPILE_FROM else "numpy")
        self._model.backend = backend
        # Compiled, bm25s searches without the GIL and on all cores; numpy gains nothing by threads.
        workers = resources.cores() if backend == "numba" else 1
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="bm25")
        if backend == "numba":
            self._model.compile()
            self._search_one([0], 1)  # compiles now, not in the first request

    def __len__(self) -> int:
        return self._rows

    def search(self, queries: Sequence[str], topk: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query its rows and scores, best first; at most `topk`, all scores above 0.

        Words are added in one fixed order: a query's result depends on nothing but its words, and
        with an analysis without `repeats` on nothing but their set.
        """
        known = self._model.vocab_dict
        analysis = self._analysis
        found = [[known[w] for w in analysis.words(query) if w in known] for query in queries]
        ids = [sorted(some if analysis.repeats else set(some)) for some in found]
        return list(self._pool.map(lambda query: self._search_one(query, topk), ids))

    def _search_one(self, ids: list[int], topk: int) -> tuple[np.ndarray, np.ndarray]:
        if not ids:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        wanted = min(topk + MARGIN, self._rows)
        found = self._model.retrieve([ids], k=wanted, show_progress=False)
        rows, scores = found.documents[0], found.scores[0]
        last = min(topk, wanted) - 1
        if wanted < self._rows and scores[last] > 0 and scores[last] == scores[-1]:
            # More ties at the boundary than the margin holds: which of them came back is chance.
            every = self._model.get_scores_from_ids(ids)
            rows = np.flatnonzero(every >= scores[last])
            scores = every[rows]
        order = np.lexsort((rows, -scores))[:topk]
        order = order[scores[order] > 0]
        return rows[order], scores[order]
