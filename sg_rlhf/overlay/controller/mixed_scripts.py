"""Share of garbled responses: texts whose letters mix scripts.

A model whose weights are damaged, or were synced wrongly, writes letters of many scripts at once.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable

METRIC = "garbled/mixed_script_frac"
#: Scripts that one language writes together, by the first word of a character's Unicode name.
WRITTEN_TOGETHER = (
    {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"},
    {"CJK", "HANGUL"},
    {"CJK", "BOPOMOFO"},
)
#: Letters of any text: Latin ones, Greek ones (formulas), and marks that Unicode calls letters.
IGNORED = {"", "LATIN", "GREEK", "MODIFIER"}


def mixed_script_frac(texts: Iterable[str]) -> float:
    """Share, 0 to 1, of the texts with letters of several scripts, Latin and Greek not counted."""
    mixed = [_is_mixed(text) for text in texts]
    return sum(mixed) / len(mixed) if mixed else 0.0


def _is_mixed(text: str) -> bool:
    if text.isascii():
        return False
    scripts = {_script(character) for character in set(text)} - IGNORED
    return len(scripts) > 1 and not any(scripts <= group for group in WRITTEN_TOGETHER)


@functools.cache
def _script(character: str) -> str:
    """First word of a letter's Unicode name; "" for other characters."""
    letter = unicodedata.normalize("NFKC", character)[:1]  # full-width and styled letters
    if not unicodedata.category(letter or " ").startswith("L"):
        return ""
    return unicodedata.name(letter, "").split(" ")[0]
