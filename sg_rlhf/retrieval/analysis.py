"""How BM25 splits a text into words: `lucene`, as the reference's BM25 does, or plain `words`.

| | `lucene` (default) | `words` |
|---|---|---|
| words | Unicode's word boundaries (UAX #29), `John's` is `John` | runs of letters and digits |
| folded | case | case and accents |
| stop words | Lucene's 33 | the same |
| stemmed | Porter's algorithm | no |
| k1, b | 0.9, 0.4 | 1.5, 0.75 |
| a word twice in a query | counts twice | counts once |

`lucene` is what pyserini's searcher (the BM25 of Search-R1, arXiv 2503.09516) does by default:
Lucene's StandardTokenizer, EnglishPossessiveFilter, lower case, StopFilter and PorterStemFilter.
`bench/bm25_recall.py` compares the words with those of Lucene itself: they differ where the two
versions of Unicode do, and on words of more than 255 characters, which Lucene cuts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import regex  # type: ignore[import-untyped]
import Stemmer  # type: ignore[import-not-found]

#: Lucene's, which are also bm25s's; from there they would cost its import.
_STOPWORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there
these they this to was will with
"""
STOPWORDS = frozenset(_STOPWORDS.split())


@dataclass(frozen=True)
class Analysis:
    """A way to split texts, with the parameters of BM25 that go with it.

    Attributes:
        revision: changes whenever `words` does; an index and its queries must be split alike.
        words: a text's words in their order.
        repeats: whether a word counts as often as a query repeats it.
    """

    name: str
    revision: str
    k1: float
    b: float
    repeats: bool
    words: Callable[[str], list[str]]

    @property
    def identity(self) -> dict[str, str | float]:
        """What a manifest says of it."""
        return {
            "model": "bm25", "revision": self.revision, "analysis": self.name,
            "k1": self.k1, "b": self.b,
        }  # fmt: skip


def plain_words(text: str) -> list[str]:
    """The words of a text: casefolded, without accents and English stop words."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in decomposed if not unicodedata.combining(char))
    return [word for word in _WORD.findall(text.casefold()) if word not in STOPWORDS]


def lucene_words(text: str) -> list[str]:
    """The words of a text as Lucene's English analysis has them, each as its Porter stem."""
    terms: list[str] = []
    # No word crosses white space, but for this one, which joins as an underscore does.
    for piece in [text] if "\N{NARROW NO-BREAK SPACE}" in text else text.split():
        terms += _terms(piece) if len(piece) <= _CACHED_CHARS else _terms.__wrapped__(piece)
    return terms


LUCENE = Analysis("lucene", "lucene-english-1", 0.9, 0.4, True, lucene_words)
WORDS = Analysis("words", "nfkd-casefold-words-en-1", 1.5, 0.75, False, plain_words)
ANALYSES = {analysis.name: analysis for analysis in (LUCENE, WORDS)}


def of_revision(revision: str | None) -> Analysis | None:
    """The analysis that an index was built with; None: no one that this version knows."""
    return next((some for some in ANALYSES.values() if some.revision == revision), None)


_WORD = re.compile(r"\w+")
_POSSESSIVE = tuple(mark + s for mark in "'\N{RIGHT SINGLE QUOTATION MARK}＇" for s in "sS")
_PORTER = Stemmer.Stemmer("porter", 0)

# UAX #29 for ASCII, where a colon, a full stop or an apostrophe joins two letters, and a comma, a
# semicolon, a full stop or an apostrophe two digits. Possessive quantifiers: it never goes back.
_ASCII_WORD = re.compile(
    r"_*+(?:(?:[A-Za-z]++(?:[:.'][A-Za-z]++)*+|[0-9]++(?:[.,;'][0-9]++)*+)_*+)++"
)


def _unicode_word() -> regex.Pattern[str]:
    """The same by Unicode's properties; a Han or Hiragana character is a word, so is an emoji."""
    mark = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    hebrew = rf"\p{{WB=Hebrew_Letter}}{mark}"
    quoted = rf"""{hebrew}(?:"{mark}(?={hebrew})|'{mark})"""
    letter = rf"(?:{quoted}|[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{mark})"
    digit = rf"(?:\p{{WB=Numeric}}{mark})"
    katakana = rf"(?:\p{{WB=Katakana}}{mark})"
    connector = rf"(?:\p{{WB=ExtendNumLet}}{mark})"
    within_letters = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{mark}"
    within_digits = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{mark}"
    letters = rf"{letter}++(?:{within_letters}{letter}++)*+"
    digits = rf"{digit}++(?:{within_digits}{digit}++)*+"
    run = rf"(?:(?:{letters}|{digits})++|{katakana}++)"
    variant = r"[\p{WB=Extend}\p{WB=Format}]*+"
    picture = rf"[\p{{Extended_Pictographic}}\U0001F3FB-\U0001F3FF]{variant}"
    return regex.compile(
        rf"{connector}*+{run}(?:{connector}++{run})*+{connector}*+"
        rf"|\p{{Han}}{mark}|\p{{Hiragana}}{mark}|(?:\p{{LB=SA}}{mark})++"
        rf"|{picture}(?:\u200d{picture})*+\u200d*+|\p{{RI}}{mark}\p{{RI}}{mark}",
        regex.V1,
    )


_UNICODE_WORD = _unicode_word()


#: Longer pieces are not kept: there is no telling how long, and they do not come again.
_CACHED_CHARS = 40


@lru_cache(maxsize=1 << 17)  # most pieces of a text come again, and a stem takes 3 microseconds
def _terms(piece: str) -> tuple[str, ...]:
    """What a piece without white space is indexed as."""
    found = _ASCII_WORD.findall(piece) if piece.isascii() else _UNICODE_WORD.findall(piece)
    folded = (_fold(word[:-2] if word.endswith(_POSSESSIVE) else word) for word in found)
    return tuple(_stem(word) for word in folded if word not in STOPWORDS)


def _fold(word: str) -> str:
    # Character by character, as Lucene: no final sigma, and a capital I with a dot is one i.
    return word.lower() if word.isascii() else "".join(char.lower()[0] for char in word)


# Words in which the second step of Porter's algorithm meets "bli" or "logi".
_BLI = re.compile(r"(?<!a)bl(?:ies|[yi](?:s|(?:ed|ing)s?)?)$")
_LOGI = re.compile(r"log(?:ies|[yi](?:s|(?:ed|ing)s?)?)$")


def _stem(word: str) -> str:
    """Porter's stem as Lucene has it, from that of the paper (1980), which Snowball keeps to.

    Lucene follows Porter's own later program: it leaves words of up to two letters alone, and has
    bli -> ble and logi -> log in step 2.
    """
    if len(word) <= 2:
        return word
    stem: str = _PORTER.stemWord(word)
    if stem.endswith("logi") and _LOGI.search(word) and _measure_above_0(stem[:-4]):
        return stem[:-1]
    if stem.endswith("bli") and _BLI.search(word) and _measure_above_0(stem[:-3]):
        stem = _PORTER.stemWord(f"{stem[:-1]}e")
    return stem


def _measure_above_0(stem: str) -> bool:
    """Whether a vowel is followed by a consonant; y is a vowel behind a consonant."""
    vowel = False
    for place, char in enumerate(stem):
        before, vowel = vowel, char in "aeiou" or (char == "y" and place > 0 and not vowel)
        if before and not vowel:
            return True
    return False
