"""BM25: the textbook formula, ties by row, and results that do not depend on the batch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import bm25s  # type: ignore[import-untyped]
import numpy as np
import pytest
import Stemmer  # type: ignore[import-not-found]

from sg_rlhf.retrieval import bm25
from sg_rlhf.retrieval.bm25 import K1, B, BM25Backend, words
from tests.unit.retrieval.conftest import write_corpus


@pytest.fixture(scope="module")
def backend(bm25_index: Path) -> BM25Backend:
    return BM25Backend(bm25_index / "bm25")


def textbook(texts: list[str], query: str) -> np.ndarray:
    """Lucene's BM25 in float64, word by word."""
    documents = [Counter(words(text)) for text in texts]
    lengths = [sum(counts.values()) for counts in documents]
    average = sum(lengths) / len(lengths)
    scores = np.zeros(len(texts))
    for word, count in Counter(words(query)).items():
        holders = sum(word in counts for counts in documents)
        if not holders:
            continue
        rarity = math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
        for row, counts in enumerate(documents):
            norm = K1 * (1 - B + B * lengths[row] / average)
            scores[row] += count * rarity * counts[word] / (counts[word] + norm)
    return scores


@pytest.mark.parametrize("pick", [0, 7, 41])
def test_scores_are_the_textbooks(backend: BM25Backend, texts: list[str], pick: int) -> None:
    query = " ".join(texts[pick].split()[2:9]) + " film war films unknownword"
    [(rows, scores)] = backend.search([query], 5)
    expected = textbook(texts, query)
    assert scores == pytest.approx(expected[rows], rel=1e-5)
    assert scores == pytest.approx(np.sort(expected)[::-1][:5], rel=1e-5)


def test_words_are_those_of_bm25s(texts: list[str]) -> None:
    some = [*texts[:50], "The Cities' running, a B.C. don't X-ray 3 30", ""]
    expected = bm25s.tokenize(
        some, stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False,
        show_progress=False,
    )  # fmt: skip
    assert [words(text) for text in some] == expected


def test_the_same_index_in_every_process(bm25_index: Path, corpus: Path, tmp_path: Path) -> None:
    script = "import sys; from sg_rlhf.retrieval.index import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "index"
    subprocess.run(
        [sys.executable, "-c", script, "--corpus", corpus, "--encoder", "bm25", "--out", out],
        check=True, env={**os.environ, "PYTHONHASHSEED": "12345"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for file in (bm25_index / "bm25").iterdir():
        assert file.read_bytes() == (out / "bm25" / file.name).read_bytes(), file.name


def test_a_title_finds_its_passage(backend: BM25Backend, texts: list[str]) -> None:
    titles = [text.split("\n")[0] for text in texts]
    found = backend.search(titles, 1)
    hits = [rows[0] == row for row, (rows, _) in enumerate(found)]
    # A syllable word may be drawn twice, so a few titles share theirs.
    assert np.mean(hits) > 0.97


def test_alone_or_in_a_batch(backend: BM25Backend, texts: list[str]) -> None:
    queries = [text[:60] for text in texts[:64]] + ["film", "", "zzzz"]
    together = backend.search(queries, 3)
    for query, (rows, scores) in zip(queries, together, strict=True):
        [(rows_alone, scores_alone)] = backend.search([query], 3)
        assert np.array_equal(rows, rows_alone)
        assert np.array_equal(scores, scores_alone)


def test_word_order_changes_nothing(backend: BM25Backend) -> None:
    first, second = backend.search(["film river war", "films River war"], 5)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


def test_what_shares_no_word_is_no_result(backend: BM25Backend) -> None:
    assert [len(rows) for rows, _ in backend.search(["zzzz", "", "the of"], 3)] == [0, 0, 0]


@pytest.mark.parametrize("equal", [5, bm25.MARGIN + 40])
@pytest.mark.parametrize("compiled", ["numpy", "numba"])
def test_ties_go_to_the_lower_row(tmp_path: Path, equal: int, compiled: str) -> None:
    """Also where more passages tie than the margin holds: rows 10, 12, ... are all the same."""
    texts = [f'"T"\nfiller word number{row}' for row in range(10)]
    for row in range(equal):
        texts += ['"Same"\nalpha beta', f'"Other"\ngamma number{row}']
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    bm25.build(corpus, tmp_path / "index")
    backend = BM25Backend(tmp_path / "index", compiled)  # type: ignore[arg-type]
    [(rows, scores)] = backend.search(["alpha"], 4)
    assert rows.tolist() == [10, 12, 14, 16]
    assert len(set(scores.tolist())) == 1


def test_compiled_or_not_is_the_same(bm25_index: Path, texts: list[str]) -> None:
    plain = BM25Backend(bm25_index / "bm25", "numpy")
    compiled = BM25Backend(bm25_index / "bm25", "numba")
    queries = [text[:80] for text in texts[:50]] + ["war film war"]
    for one, other in zip(plain.search(queries, 10), compiled.search(queries, 10), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_more_asked_than_there_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["alpha", "alpha beta", "gamma"])
    bm25.build(corpus, tmp_path / "index")
    [(rows, _)] = BM25Backend(tmp_path / "index").search(["alpha beta"], 100)
    assert rows.tolist() == [1, 0]


def test_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["...", "the"])
    with pytest.raises(ValueError, match="no words"):
        bm25.build(corpus, tmp_path / "index")
