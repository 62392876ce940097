"""BM25 with bm25s: the backend that needs neither a GPU nor a model.

Words are runs of two or more letters and digits in lower case, without English stop words, stemmed
by Snowball's English stemmer. Scores are bm25s's `lucene` variant with Anserini's k1 and b. Of
equal scores the lower row comes first. A passage that shares no word with the query is no result.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import bm25s  # type: ignore[import-untyped]
import numpy as np
import Stemmer  # type: ignore[import-not-found]
from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped]
from bm25s.tokenization import Tokenized  # type: ignore[import-untyped]
from tqdm import tqdm

from sg_rlhf.common import resources
from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.retrieval.corpus import iterate_contents

K1, B = 0.9, 0.4
#: The manifest's entry: an index and its queries must be split into words alike.
IDENTITY: dict[str, Any] = {"model": "bm25", "revision": "bm25s-english-1", "k1": K1, "b": B}
#: Candidates beyond topk, among which ties at the boundary are settled.
MARGIN = 32
#: From this many passages on numba is used: it searches 5 times faster, after 9 s of compiling.
COMPILE_FROM = 200_000


_WORD = re.compile(r"(?u)\b\w\w+\b")
_STOPWORDS = frozenset(STOPWORDS_EN)
_stem = lru_cache(maxsize=1 << 17)(Stemmer.Stemmer("english").stemWord)


def words(text: str) -> list[str]:
    """The words of a text as they are indexed: `bm25s.tokenize` with Snowball's English stemmer.

    That function numbers words in the order of a set, which each process has differently: an index
    would have other bytes, and sums other roundings, each time.
    """
    return [_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOPWORDS]


def build(corpus: Path, out: Path) -> None:
    """Index a corpus into the folder `out`; ValueError if no passage has a word."""
    vocabulary: dict[str, int] = {}
    texts = tqdm(iterate_contents(corpus), desc="splitting words", unit="passage", disable=None)
    ids = [
        array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)])
        for text in texts
    ]
    if not vocabulary:
        raise ValueError(f"{corpus}: no words in any passage, nothing to index")
    model = bm25s.BM25(k1=K1, b=B, method="lucene")
    model.index(Tokenized(ids, vocabulary), show_progress=sys.stderr.isatty())
    with disk_full_context(out):
        model.save(out, show_progress=False)


class BM25Backend:
    """Search in a folder written by `build`; its arrays stay on disk, its vocabulary in memory."""

    def __init__(self, folder: Path, backend: Literal["numpy", "numba"] | None = None) -> None:
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

        Words are added in one fixed order, so a result depends on nothing but the query's words.
        """
        known = self._model.vocab_dict
        found = [[known[word] for word in words(query) if word in known] for query in queries]
        ids = [sorted(some) for some in found]
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
