"""Run content is untrusted text (a model wrote it): shown, never interpreted."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

#: Control characters, invisible format characters (those that reverse the reading direction among
#: them), lone surrogates, private use and unassigned code points.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_KEPT = {"\n", "\t"}


def visible(text: str) -> str:
    """``text`` with every character that has no picture of its own written as ``⟨U+XXXX⟩``.

    Newlines and tabs stay. The result can be encoded as UTF-8, drawn, and put into XML.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c
        if c in _KEPT or unicodedata.category(c) not in _INVISIBLE
        else f"\u27e8U+{ord(c):04X}\u27e9"
        for c in text
    )


def one_line(text: str) -> str:
    """``visible`` without line breaks: for names and labels."""
    return " ".join(visible(text).split())


def embedded_json(value: Any) -> str:
    """JSON for a ``<script type="application/json">`` element.

    ASCII only, and without ``<``, ``>`` and ``&``, so that no content can end the element, open a
    comment, or be a line terminator that some parser honours.

    Raises:
        ValueError: NaN or infinity, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
