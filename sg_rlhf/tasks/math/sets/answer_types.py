"""What kind of answer a gold is, by its text: for the report of a data set, not for grading."""

from __future__ import annotations

import re

# In the order of the report; the first that fits counts.
TYPES = (
    "integer",
    "decimal",
    "fraction",
    "percent or unit",
    "interval, tuple or set",
    "matrix",
    "equation or inequality",
    "expression",
    "choice letter",
    "text",
)

_SPACING = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:| )|\$|\\[()\[\]]|~")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))|(?<=\d)\{,\}(?=\d{3}(?:\D|$))")
_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?\d*\.\d+(?:e[+-]?\d+)?|[+-]?\d+e[+-]?\d+")
_FRACTION = re.compile(
    r"[+-]?\d*\\[dt]?frac(?:\{[+-]?\d+\}|\d)(?:\{[+-]?\d+\}|\d)|[+-]?\(?\d+\)?/\(?\d+\)?"
)
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox|mathbf|textit|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"[+-]?[\d./]+(?:\\times10\^\{?[+-]?\d+\}?)?(?:\\?%|\^\{?\\circ\}?|\\circ|°)")
_MEASURE = re.compile(
    r"[+-]?[\d./]+\s*(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*[a-z][^{}]*\}|[a-z]{2,}).*"
)
_GROUP = re.compile(r"[(\[].+,.+[)\]]|\\\{.*\\\}|\{.*,.*\}|.*\\(?:cup|cap|infty|emptyset|in)\b.*")
_RELATION = re.compile(r"(?<![\\])[=<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt|equiv|approx)(?![a-z])")
_PROSE = re.compile(r"[^\W\d_]{4,}|[^\W\d_]{2,}\s+[^\W\d_]{2,}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def answer_type(gold: str) -> str:
    """One of `TYPES` for a gold answer."""
    text = _SPACING.sub("", gold).strip().rstrip(".")
    compact = _THOUSANDS.sub("", "".join(text.split()))
    low = compact.casefold()
    for name, pattern in (
        ("integer", _INTEGER),
        ("decimal", _DECIMAL),
        ("fraction", _FRACTION),
        ("percent or unit", _UNIT),
    ):
        if pattern.fullmatch(low):
            return name
    if _MEASURE.fullmatch(_THOUSANDS.sub("", text).casefold()):
        return "percent or unit"
    if re.search(r"\\begin\{\w*(?:matrix|array)", text):
        return "matrix"
    inside = _WORDS.sub(r" \1 ", text).strip()
    if re.fullmatch(r"\(?[A-Ja-j]\)?", "".join(inside.split())) and inside != inside.lower():
        return "choice letter"
    if _PROSE.search(_COMMAND.sub(" ", inside)):
        return "text"
    if _GROUP.fullmatch(compact) or _is_list(compact):
        return "interval, tuple or set"
    if _RELATION.search(text):
        return "equation or inequality"
    return "expression"


def _is_list(compact: str) -> bool:
    """Several values separated by commas outside all brackets: "1, 2" but not "f(1, 2)"."""
    depth = 0
    for letter in compact:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            return True
    return False
