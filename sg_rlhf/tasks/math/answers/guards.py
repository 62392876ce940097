"""Answers that are rejected before anything is parsed: too large, code, or several answers."""

from __future__ import annotations

import re

from sg_rlhf.tasks.math.answers.rules import Pairs, Reason, Rule

# The longest reference answer of the five evaluation sets and of DSR-Uniform has 204 characters,
# the longest number 18 digits, the deepest nesting 4, the highest exponent 4 digits.
MAX_CHARACTERS = 500
MAX_DIGITS = 40
MAX_NESTING = 20


def reject_reason(answer: str) -> Reason | None:
    """Why a normalised answer is not handed to the parser, or None if it may be."""
    return next((reason for rule in GUARDS if (reason := rule.apply(answer))), None)


def _guard(
    name: str, does: str, reason: Reason, pattern: str, right: Pairs = (), near_misses: Pairs = ()
) -> Rule:
    found = re.compile(pattern).search
    return Rule(name, does, lambda text: reason if found(text) else None, right, near_misses)


def _too_nested(answer: str) -> Reason | None:
    depth = 0
    for character in answer:
        depth += (character in "{([") - (character in "})]")
        if depth > MAX_NESTING:
            return Reason.TOO_COMPLEX
    return None


# fmt: off
#: Normalised answer -> the reason for rejecting it, or None.
GUARDS: tuple[Rule, ...] = (
    _guard("long text", f"Reject more than {MAX_CHARACTERS} characters.", Reason.TOO_LONG,
        rf"(?s)^.{{{MAX_CHARACTERS + 1}}}", near_misses=(("+".join("x" * 300), "300x"),)),
    _guard("long number", f"Reject a number of more than {MAX_DIGITS} digits.", Reason.TOO_LONG,
        rf"[0-9](?:[ ,_]?[0-9]){{{MAX_DIGITS}}}", near_misses=(("9" * 41, "9" * 40),
        ("1" + "0" * 41, "10^{41}"))),
    Rule("deep nesting", f"Reject brackets nested deeper than {MAX_NESTING}.", _too_nested,
        near_misses=(("(" * 21 + "x" + ")" * 21, "x"),)),
    # The pool's limit is what makes grading safe; this saves a worker for each of the commonest.
    _guard("explosive", "Reject powers, factorials and binomials that take for ever.",
        Reason.TOO_COMPLEX, r"\^\s*[({]?\s*[+-]?[0-9]{5,}"  # an exponent of 5 digits
        r"|[0-9]{4,}\s*[)}]?\s*!|!\s*[)}]?\s*!"  # a factorial of 4 digits, or of a factorial
        r"|\^\s*[({][^(){}^]*\^\s*[({][^(){}^]*\^"  # a power tower: 2^{2^{2^2}}
        r"|[0-9]\s*\^\s*[0-9]+\s*\^\s*[0-9]" r"|\\binom\s*\{[0-9]{4,}|[0-9]e[+-]?[0-9]{3,}",
        near_misses=(("9^{9^{9^9}}", "9"),)),
    _guard("code", "Reject Python.", Reason.CODE_LIKE,
        r"__|(?<![A-Za-z\\])(?:import|lambda|eval|exec|getattr|setattr|globals|compile|open|print)"
        r"(?![A-Za-z])|[A-Za-z_)\]]\.[A-Za-z_]\w*\s*\(", near_misses=(("open(x).read()", "x"),
        ("import", "i m p o r t"))),
    # math-verify reads 5'6 as 56 and 5 6 as a product.
    _guard("two numbers side by side", "Reject two numbers without a sign between them.",
        Reason.UNPARSEABLE, r"""[0-9]\s*["'`]+\s*[0-9]|[0-9] +[0-9.]""",
        near_misses=(("5'6", "56"),)),
    # Letters are variables to math-verify, so that "it is surely 0" is a product, and 0.
    _guard("prose", "Reject a word before a number.", Reason.UNPARSEABLE,
        r"(?<![\\A-Za-z{])(?!(?:and|or|sin|cos|tan|log|ln|sqrt|pi|inf)\b)[A-Za-z]{2,}\s+[-+(]?[0-9]",
        near_misses=(("surely 5, not 6", "5"), ("it is surely 0 I think", "0"))),
    # math-verify leaves out what dots stand for: 1, 2, \ldots, 10 would be three numbers.
    _guard("dots", "Reject dots that stand for something.", Reason.UNPARSEABLE,
        r"\\[lc]?dots[a-z]?(?![A-Za-z])|\.\.\.", near_misses=((r"1,2,\ldots,10", "1,2,10"),
        (r"1+2+\ldots+10", "13"), (r"0.333\ldots", "0.333"))),
    _guard("index of a number",
        "Reject an index of a number that is not the base of the whole answer.", Reason.UNPARSEABLE,
        r"^(?![0-9A-Fa-f]+_\{?[0-9]{1,2}\}?$).*[0-9]\s*_", near_misses=(("5_{a}", "5"),)),
)
# fmt: on
