r"""Answers that are refused before anything is parsed: too large, code, or more than one answer."""

from __future__ import annotations

import re

from sg_rlhf.tasks.math.answers.reason import Reason

# The longest gold of the five evaluation sets and of DSR-Uniform has 204 characters, the longest
# number 18 digits, the deepest nesting 4, the highest numeric exponent 4 digits and the largest
# factorial 100!.
MAX_CHARACTERS = 500
MAX_DIGITS = 40
MAX_NESTING = 20

_LONG_NUMBER = re.compile(rf"[0-9](?:[ ,_]?[0-9]){{{MAX_DIGITS}}}")
# Evaluating these could take time or memory without end. The pool's limit is what makes grading
# safe; this spares it the loss of a worker for each of the commonest.
_EXPLOSIVE = re.compile(
    r"\^\s*[({]?\s*[+-]?[0-9]{5,}"  # an exponent of 5 digits
    r"|[0-9]{4,}\s*[)}]?\s*!|!\s*[)}]?\s*!"  # a factorial of 4 digits, or of a factorial
    r"|\^\s*[({][^(){}^]*\^\s*[({][^(){}^]*\^"  # a power tower: 2^{2^{2^2}}
    r"|[0-9]\s*\^\s*[0-9]+\s*\^\s*[0-9]"
    r"|\\binom\s*\{[0-9]{4,}|[0-9]e[+-]?[0-9]{3,}"
)
_CODE = re.compile(
    r"__|(?<![A-Za-z\\])(?:import|lambda|eval|exec|getattr|setattr|globals|compile|open|print)"
    r"(?![A-Za-z])|[A-Za-z_)\]]\.[A-Za-z_]\w*\s*\("
)
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{([^{}]*)\}")
_HEDGE = re.compile(r"[0-9]|\b(?:or|maybe|perhaps|possibly|either|not)\b", re.IGNORECASE)
# Letters are variables to math-verify, so that "it is surely 0" is a product, and 0.
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])(?!(?:and|or|sin|cos|tan|log|ln|sqrt|pi|inf)\b)[A-Za-z]{2,}\s+[-+(]?[0-9]"
)
# math-verify leaves out what dots stand for: 1, 2, \ldots, 10 would be three numbers.
_DOTS = re.compile(r"\\[lc]?dots[a-z]?(?![A-Za-z])|\.\.\.")
_BELOW_A_NUMBER = re.compile(r"^(?![0-9A-Fa-f]+_\{?[0-9]{1,2}\}?$).*[0-9]\s*_")
_LIST_WORD = re.compile(r"\s*,?\s*(?:and|or)\s*,?\s*", re.IGNORECASE)
# math-verify reads "5'6" as 56 and "5 6" as a product.
_JUXTAPOSED = re.compile(
    r"""[0-9]\s*["'`]+\s*[0-9]|[0-9] +[0-9.]|[0-9]\s*\\(?:quad|qquad)\s*[0-9]"""
)


def reject_reason(answer: str) -> Reason | None:
    r"""Why a tidied answer is not handed to the parser, or None if it may be.

    Words between alternatives are read as a list, so `3 \text{ or } 5` is the set of both; any
    other text with a digit or a word such as "or" in it is a hedge: math-verify drops a final
    `\text{...}` as a unit, and would read `5 \text{ or 6}` as 5.
    """
    if len(answer) > MAX_CHARACTERS or _LONG_NUMBER.search(answer):
        return Reason.TOO_LONG
    if _nesting(answer) > MAX_NESTING or _EXPLOSIVE.search(answer):
        return Reason.TOO_COMPLEX
    if _CODE.search(answer):
        return Reason.CODE_LIKE
    if (
        not answer.isascii()
        or not answer.isprintable()
        or r"\boxed" in answer
        or r"\fbox" in answer
    ):
        return Reason.UNPARSEABLE
    if _JUXTAPOSED.search(answer) or _PROSE.search(answer):
        return Reason.UNPARSEABLE
    # What is below a number, such as its base, is not read.
    if _DOTS.search(answer) or _BELOW_A_NUMBER.search(answer):
        return Reason.UNPARSEABLE
    for text in _TEXT.findall(answer):
        if _HEDGE.search(text) and not _LIST_WORD.fullmatch(text):
            return Reason.AMBIGUOUS
    return None


def _nesting(answer: str) -> int:
    depth = deepest = 0
    for character in answer:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest
