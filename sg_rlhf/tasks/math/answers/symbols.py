r"""Plain symbols for derivatives and unusual subscripts, which the parser misreads.

It takes dx/dt for 0, y' for y, I for i, and E_1 or L_{\odot} for nothing that it knows.
"""

from __future__ import annotations

import re

from sg_rlhf.tasks.math.answers.rules import Rule

_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|"
    r"xi|rho|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|"
    r"Omega|hbar|ell)(?![A-Za-z])"
)
_INDEX = r"(?:_\s*(?P<brace>\{\s*)?(?P<index>[A-Za-z0-9])(?(brace)\s*\}))?"
_FRACTION = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(?P<n>[0-9])\}?)?\s*(?P<of>\\?[A-Za-z]+)\s*"
    rf"{_INDEX}\s*(?:\(\s*[A-Za-z]\s*\))?\s*\}}"
    r"\s*\{\s*(?:d|\\partial)\s*(?P<by>[A-Za-z])\s*(?:\^\s*\{?(?P<m>[0-9])\}?)?\s*\}"
)
_DOTTED = re.compile(
    r"\\(?P<dots>d?)dot\s*(?:\{\s*(?P<of>\\?[A-Za-z]+)\s*\}|(?P<of1>[A-Za-z](?![A-Za-z])))"
    rf"{_INDEX}(?:\s*\(\s*t\s*\))?"
)
_PRIMES = re.compile(r"(?<![\\A-Za-z])([A-Za-z])('+)")
_DERIVATIVE = re.compile(r"D_\{[0-9]Q(\w+)Q(\w*)\}")
_SUBSCRIPT = re.compile(
    rf"(?P<base>{_GREEK}|(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]))\s*_\s*"
    r"(?:\{(?P<index>(?:[^{}]|\{[^{}]*\})*)\}|(?P<one>[A-Za-z0-9]|\\[A-Za-z]+))"
)
_LETTER_I = re.compile(r"(\\text\s*\{[^{}]*\}|\\[A-Za-z]+|\b[DZ]_\{[^{}]*\})|I")
_STYLE = re.compile(r"\\(?:text|mathrm|mbox|rm|mathit|operatorname)(?![A-Za-z])")


def protect(text: str) -> str:
    r"""The same with a plain symbol for each derivative and for each subscript that is not read.

    >>> protect(r"\frac{dx}{dt} = k x(t) + E_1 - m_{\max}")
    'D_{1QxQt} = k x  + Z_{E1} - Z_{mmax}'
    """
    for rule in SYMBOLS:
        text = rule.apply(text)
    return text.strip()


def _protected(order: int | str, of: str, index: str | None, by: str) -> str:
    return f" D_{{{order}Q{of.strip(chr(92))}{index or ''}Q{by}}}"


def _fraction(match: re.Match[str]) -> str:
    orders = {match["n"] or "1", match["m"] or "1"}
    if len(orders) > 1:
        return match[0].replace("frac", "badfrac")  # no derivative: the parser must not see one
    return _protected(orders.pop(), match["of"], match["index"], match["by"])


def _dotted(match: re.Match[str]) -> str:
    order = 2 if match["dots"] else 1
    return _protected(order, match["of"] or match["of1"], match["index"], "t")


def _without_arguments(text: str) -> str:
    for of, by in sorted(set(_DERIVATIVE.findall(text))):
        called = rf"(\\?{of})\s*\(\s*{by}\s*\)|(\\[A-Za-z]+)" if by else "(?!)"
        text = re.sub(called, lambda match: match[2] or f"{match[1]} ", text)
    return text


def _subscript(match: re.Match[str]) -> str:
    index = match["index"] if match["index"] is not None else match["one"]
    # n + 1 is a value, not a name.
    if _DERIVATIVE.fullmatch(match[0]) or re.search(r"[-+*=^]", index):
        return match[0]
    plain = re.sub(r"[^A-Za-z0-9]", "", _STYLE.sub("", index))
    readable = match["base"] not in ("E", "I") and re.fullmatch(r"\s*[A-Za-z0-9]+\s*", index)
    return match[0] if not plain or readable else f"Z_{{{match['base'].strip(chr(92))}{plain}}}"


# fmt: off
#: Text -> text, before a single value is parsed.
SYMBOLS: tuple[Rule, ...] = (
    Rule("derivative as a fraction", "Name \\frac{dx}{dt} by a symbol.",
        lambda t: _FRACTION.sub(_fraction, t),
        right=((r"\frac{dx}{dt}=-a+kx", r"\frac{dx}{dt} = kx - a"),),
        near_misses=(("kx=a", r"\frac{dx}{dt} = kx - a"),
        (r"\frac{d^2y}{dt^2}=k", r"\frac{dy}{dt}=k"),
        (r"\frac{d^{2} v}{d t^{7}}=k", r"\frac{d^{2} v}{d t^{2}}=k"))),
    Rule("derivative as a dot", "Name \\dot{x} by a symbol.", lambda t: _DOTTED.sub(_dotted, t),
        right=((r"\frac{\dot{x}_0}{a}\sin t", r"\sin(t) \frac{\dot{x}_{0}}{a}"),),
        near_misses=(("mv = f - bv", r"m \dot{v}+b v=f"),)),
    Rule("argument of the unknown", "Write x for x(t) where its derivative occurs.",
        _without_arguments, right=((r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kx - a"),),
        near_misses=((r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kt - a"),)),
    Rule("derivative as a prime", "Name y' by a symbol.",
        lambda t: _PRIMES.sub(lambda m: _protected(len(m[2]), m[1], None, ""), t),
        right=(("y'=2x", "y' = 2x"),), near_misses=(("y=2x+y", "y'=2x+y"),)),
    Rule("subscripts", "Name a letter with an index that is not read by a symbol.",
        lambda t: _SUBSCRIPT.sub(_subscript, t), right=(("E_2, E_1", "E_{1},E_{2}"),
        ("n^2-n-1", r"m_{\max }=n^{2}-n-1")), near_misses=(("E_1", "E_2"), (r"L_{\odot}", "L"),
        (r"m_{\min} = n^2", r"m_{\max} = n^2"))),
    # A current or a moment; the parser takes it for the number i.
    Rule("letter I", "Name the letter I by a symbol.",
        lambda t: _LETTER_I.sub(lambda m: m[1] or " Z_{I}", t), right=(("I^2R", "RI^2"),),
        near_misses=(("I", "i"), ("-1", "I^2"), ("3+4I", "3+4i"))),
)
# fmt: on
