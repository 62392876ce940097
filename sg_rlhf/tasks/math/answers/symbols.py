r"""Names in the place of what the parser reads as something else: derivatives and odd indices.

It takes dx/dt for 0, y' for y, I for i, and E_1 or L_{\odot} for nothing that it knows.
"""

from __future__ import annotations

import re

_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|"
    r"xi|rho|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|"
    r"Omega|hbar|ell)(?![A-Za-z])"
)
_BASE = rf"(?:{_GREEK}|(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]))"
_FRACTION = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(?P<n>[0-9])\}?)?\s*(?P<of>\\?[A-Za-z]+)\s*"
    r"(?:_\s*(?P<brace>\{\s*)?(?P<index>[A-Za-z0-9])(?(brace)\s*\}))?\s*(?:\(\s*[A-Za-z]\s*\))?\s*\}"
    r"\s*\{\s*(?:d|\\partial)\s*(?P<by>[A-Za-z])\s*(?:\^\s*\{?(?P<m>[0-9])\}?)?\s*\}"
)
_DOTTED = re.compile(
    r"\\(?P<dots>d?)dot\s*(?:\{\s*(?P<of>\\?[A-Za-z]+)\s*\}|(?P<of1>[A-Za-z](?![A-Za-z])))"
    r"(?:_\s*(?P<brace>\{\s*)?(?P<index>[A-Za-z0-9])(?(brace)\s*\}))?(?:\s*\(\s*t\s*\))?"
)
_PRIMES = re.compile(r"(?<![\\A-Za-z])([A-Za-z])('+)")
_INDEXED = re.compile(
    rf"(?P<base>{_BASE})\s*_\s*"
    r"(?:\{(?P<index>(?:[^{}]|\{[^{}]*\})*)\}|(?P<one>[A-Za-z0-9]|\\[A-Za-z]+))"
)
# The parser takes a letter I, a current or a moment, for the number i.
_LETTER_I = re.compile(r"(\\text\s*\{[^{}]*\}|\\[A-Za-z]+|\b[DZ]_\{[^{}]*\})|I")
_STYLE = re.compile(r"\\(?:text|mathrm|mbox|rm|mathit|operatorname)(?![A-Za-z])")


def protect(text: str) -> str:
    r"""The same with a plain name for each derivative and for each index that is not read.

    >>> protect(r"\frac{dx}{dt} = k x(t) + E_1 - m_{\max}")
    'D_{1QxQt} = k x  + Z_{E1} - Z_{mmax}'
    """
    unknowns = {(m["of"], m["by"]) for m in _FRACTION.finditer(text)}
    text = _FRACTION.sub(_derivative, text)
    unknowns |= {(m["of"] or m["of1"], "t") for m in _DOTTED.finditer(text)}
    text = _DOTTED.sub(_dotted, text)
    # x(t) beside dx/dt is x, not a product and not another function.
    for name, variable in sorted(unknowns):
        text = _without_argument(text, name, variable)
    text = _PRIMES.sub(lambda m: _protected(len(m[2]), m[1], None, ""), text)
    text = _INDEXED.sub(_indexed, text)
    return _LETTER_I.sub(lambda m: m[1] or " Z_{I}", text).strip()


def _without_argument(text: str, name: str, variable: str) -> str:
    called = rf"{re.escape(name)}\s*\(\s*{variable}\s*\)|(\\[A-Za-z]+)"
    return re.sub(called, lambda match: match[1] or f"{name} ", text)


def protected_name(name: str) -> tuple[str, str] | None:
    """Of what and by what, where a symbol's name is that of a derivative."""
    match = re.fullmatch(r"D_\{[0-9]Q(\w+)Q(\w*)\}", name)
    return (match[1], match[2]) if match else None


def _protected(order: int | str, of: str, index: str | None, by: str) -> str:
    return f" D_{{{order}Q{of.strip(chr(92))}{index or ''}Q{by}}}"


def _derivative(match: re.Match[str]) -> str:
    orders = {match["n"] or "1", match["m"] or "1"}
    if len(orders) > 1:
        return match[0].replace("frac", "badfrac")  # no derivative, and the parser must not see one
    return _protected(orders.pop(), match["of"], match["index"], match["by"])


def _dotted(match: re.Match[str]) -> str:
    order = 2 if match["dots"] else 1
    return _protected(order, match["of"] or match["of1"], match["index"], "t")


def _indexed(match: re.Match[str]) -> str:
    index = match["index"] if match["index"] is not None else match["one"]
    if protected_name(match[0]):
        return match[0]
    # n + 1 is a value, not a name.
    if re.search(r"[-+*=^]", index):
        return match[0]
    plain = re.sub(r"[^A-Za-z0-9]", "", _STYLE.sub("", index))
    if not plain or (
        match["base"] not in ("E", "I") and re.fullmatch(r"\s*[A-Za-z0-9]+\s*", index)
    ):
        return match[0]
    return f"Z_{{{match['base'].strip(chr(92))}{plain}}}"
