"""BM25: the textbook formula, ties by row, and results that do not depend on the batch."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sg_rlhf.retrieval import lexical
from sg_rlhf.retrieval.analysis import ANALYSES, LUCENE, WORDS, Analysis
from sg_rlhf.retrieval.lexical import BM25Backend
from tests.unit.retrieval.conftest import write_corpus


@pytest.fixture(scope="module")
def backend(bm25_index: Path) -> BM25Backend:
    return BM25Backend(bm25_index / "bm25", LUCENE)


@pytest.fixture(scope="module")
def plain_backend(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, texts: list[str]
) -> BM25Backend:
    folder = tmp_path_factory.mktemp("plain") / "bm25"
    lexical.build(corpus, len(texts), folder, WORDS, progress=False)
    return BM25Backend(folder, WORDS)


def textbook(texts: list[str], query: str, analysis: Analysis) -> np.ndarray:
    """Lucene's BM25 in float64, word by word."""
    documents = [Counter(analysis.words(text)) for text in texts]
    lengths = [sum(counts.values()) for counts in documents]
    average = sum(lengths) / len(lengths)
    scores = np.zeros(len(texts))
    asked = Counter(analysis.words(query))
    for word, count in asked.items():
        holders = sum(word in counts for counts in documents)
        if not holders:
            continue
        rarity = math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
        for row, counts in enumerate(documents):
            norm = analysis.k1 * (1 - analysis.b + analysis.b * lengths[row] / average)
            score = rarity * counts[word] / (counts[word] + norm)
            scores[row] += score * (count if analysis.repeats else 1)
    return scores


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("pick", [0, 7, 41])
def test_scores_are_the_textbooks(
    request: pytest.FixtureRequest, texts: list[str], analysis: str, pick: int
) -> None:
    backend = request.getfixturevalue("backend" if analysis == "lucene" else "plain_backend")
    query = " ".join(texts[pick].split()[2:9]) + " film war films unknownword"
    [(rows, scores)] = backend.search([query], 5)
    expected = textbook(texts, query, ANALYSES[analysis])
    assert scores == pytest.approx(expected[rows], rel=1e-5)
    assert scores == pytest.approx(np.sort(expected)[::-1][:5], rel=1e-5)


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


@pytest.mark.parametrize(
    ("fixture", "other"),
    [("backend", "films River war"), ("plain_backend", "war WAR river film war")],
)
def test_word_order_changes_nothing_nor_repetition_of_plain_words(
    request: pytest.FixtureRequest, fixture: str, other: str
) -> None:
    backend = request.getfixturevalue(fixture)
    first, second = backend.search(["film river war", other], 5)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


def test_what_shares_no_word_is_no_result(backend: BM25Backend) -> None:
    assert [len(rows) for rows, _ in backend.search(["zzzz", "", "the of"], 3)] == [0, 0, 0]


@pytest.mark.parametrize("equal", [5, lexical.MARGIN + 40])
@pytest.mark.parametrize("compiled", ["numpy", "numba"])
def test_ties_go_to_the_lower_row(tmp_path: Path, equal: int, compiled: str) -> None:
    """Also where more passages tie than the margin holds: rows 10, 12, ... are all the same."""
    texts = [f'"T"\nfiller word number{row}' for row in range(10)]
    for row in range(equal):
        texts += ['"Same"\nalpha beta', f'"Other"\ngamma number{row}']
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    lexical.build(corpus, len(texts), tmp_path / "index", LUCENE, progress=False)
    backend = BM25Backend(tmp_path / "index", LUCENE, compiled)  # type: ignore[arg-type]
    [(rows, scores)] = backend.search(["alpha"], 4)
    assert rows.tolist() == [10, 12, 14, 16]
    assert len(set(scores.tolist())) == 1


def test_compiled_or_not_is_the_same(bm25_index: Path, texts: list[str]) -> None:
    plain = BM25Backend(bm25_index / "bm25", LUCENE, "numpy")
    compiled = BM25Backend(bm25_index / "bm25", LUCENE, "numba")
    queries = [text[:80] for text in texts[:50]] + ["war film war"]
    for one, other in zip(plain.search(queries, 10), compiled.search(queries, 10), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_more_asked_than_there_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["alpha", "alpha beta", "gamma"])
    lexical.build(corpus, 3, tmp_path / "index", LUCENE, progress=False)
    [(rows, _)] = BM25Backend(tmp_path / "index", LUCENE).search(["alpha beta"], 100)
    assert rows.tolist() == [1, 0]


def test_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["...", "the"])
    with pytest.raises(ValueError, match="no words"):
        lexical.build(corpus, 2, tmp_path / "index", LUCENE, progress=False)
