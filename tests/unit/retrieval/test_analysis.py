"""How BM25 splits texts: words as Lucene's own, taken from it (Lucene 9.5, pyserini 0.22.1)."""

from __future__ import annotations

import pytest
from bm25s.stopwords import STOPWORDS_EN
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.retrieval.analysis import ANALYSES, STOPWORDS, lucene_words, plain_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The running dogs' owners were happily relational.", "run dog owner were happili relat"),
        ("Who was Beyoncé's manager in the U.S.?", "who beyoncé manag u."),
        ("It’s JOHN＇S", "john"),
        ("3,000.5 1,2 1. 2 a:b a.1 foo_bar _x_ __", "3,000.5 1,2 1 2 a:b 1 foo_bar _x_"),
        ("e-mail C++ R&D 1994-95 $5", "e mail c r d 1994 95 5"),
        # Where Porter's own program departs from his paper, and what only looks like it.
        ("technology biology possibly assemblies bless", "technolog biologi possibl assembl bless"),
        ("anthropologie chambly publish", "anthropologi chambl publish"),
        ("as us s is by", "us s"),
        ("北京 ひらがな カタカナ한국어 ไทย", "北 京 ひ ら が な カタカナ 한국어 ไทย"),
        ("ΟΔΟΣ İzmir ǅ", "οδοσ izmir ǆ"),
        ("naïve na\u0308ive a\u200db t\u00adest", "naïv na\u0308iv a\u200db t\u00adest"),
        ('ראב"י', 'ראב"י'),
        ("☃ 👩\u200d🚀 🇫🇷", "☃ 👩\u200d🚀 🇫🇷"),
        ("10\u202f000 a\u00a0b", "10\u202f000 b"),
    ],
)  # fmt: skip
def test_lucene(text: str, words: str) -> None:
    assert lucene_words(text) == words.split(" ")


def test_words_fold_case_and_accents_and_drop_stop_words() -> None:
    assert plain_words("The CAFÉ of Łódź, 北京 naïve Straße!") == [
        "cafe", "łodz", "北京", "naive", "strasse"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ANALYSES)
def test_nothing_to_index(name: str) -> None:
    assert ANALYSES[name].words("the of and") == ANALYSES[name].words(" \t\n!?") == []


def test_the_stop_words_are_those_of_bm25s() -> None:
    assert frozenset(STOPWORDS_EN) == STOPWORDS


@given(st.text(), st.text())
def test_words_do_not_depend_on_what_stands_beside_them(one: str, other: str) -> None:
    """Pieces are split on their own and kept: white space alone may part them."""
    assert lucene_words(f"{one}\n{other}") == lucene_words(one) + lucene_words(other)
