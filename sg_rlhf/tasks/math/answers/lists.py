r"""Answers that are several values: 1, 2; x = 1 or x = 2; (1, 2), (3, 4); 2 \pm \sqrt{3}.

math-verify makes a set of a list, which forgets how often an element occurs and whose value it is.
So lists are split here, from the text, and their elements compared one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sg_rlhf.tasks.math.answers.normalize import parse_number
from sg_rlhf.tasks.math.answers.rules import Rule

MAX_ELEMENTS = 40

_TOKEN = re.compile(
    r"""(?P<open>\\begin\s*\{[a-z]*\}|\\\{|\\langle(?![A-Za-z])|[({\[])
    |   (?P<close>\\end\s*\{[a-z]*\}|\\\}|\\rangle(?![A-Za-z])|[)}\]])
    |   (?P<break>(?:\s*[,;])?(?:\s|\\q?quad(?![A-Za-z]))*
            (?:\\text\s*\{\s*[,;]?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z]))
        |   [,;])
    |   \\[A-Za-z]+|\\.|.""",
    re.VERBOSE | re.DOTALL,
)
NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:[A-Za-z0-9]|\{[^{}=]*\}))?(?:\([A-Za-z0-9]\))?"
_NAMED = re.compile(rf"({NAME})\s*=\s*([^=<>]+)")
_NAMED_TUPLE = re.compile(rf"\(\s*({NAME}(?:\s*,\s*{NAME})+)\s*\)\s*=\s*(\(.*\))")
_NAME_OF_A_SET = re.compile(rf"\s*{NAME}\s*(?:=|\\in(?![A-Za-z]))\s*(?=\\\{{)")
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")
_OR = re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|(?<![A-Za-z\\{])or(?![A-Za-z])")
_LESS = r"<|\\l(?:t|eq?|eqslant)(?![A-Za-z])"
_MORE = r">|\\g(?:t|eq?|eqslant)(?![A-Za-z])"
_BOUND = rf"(?:(?!{_LESS}|{_MORE})[^=,;])+?"
_RELATION = re.compile(
    rf"(?:(?P<left>{_BOUND})\s*(?P<before>{_LESS}|{_MORE}))?\s*(?P<name>{NAME})\s*"
    rf"(?:(?P<after>{_LESS}|{_MORE})\s*(?P<right>{_BOUND}))?"
)
_BUILDER = re.compile(r"\\mid(?![A-Za-z])|[|:]")


@dataclass(frozen=True)
class Element:
    """One element of a list: a value, or those of several names, a tuple or a `ratio` 1 : 2."""

    text: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    ratio: bool = False


@dataclass(frozen=True)
class AnswerList:
    """What a text lists; `braces` for a set, whose order says nothing."""

    elements: tuple[Element, ...]
    braces: bool


def split(text: str) -> list[str]:
    r"""The parts of a text between commas, semicolons, "and" and "or" outside all brackets.

    >>> split(r"(1,2), x=3 \text{ or } f(4,5)")
    ['(1,2)', 'x=3', 'f(4,5)']
    """
    return _split(text, lambda token: token.lastgroup == "break")


def _split(text: str, is_break: Callable[[re.Match[str]], bool]) -> list[str]:
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if depth < 0:
            return [text.strip()]
        if depth == 0 and is_break(token):
            parts.append(text[start : token.start()])
            start = token.end()
    parts.append(text[start:])
    return [part for part in map(_trimmed, parts) if part]


def _trimmed(text: str) -> str:
    return re.sub(r"^(?:\s|\\q?quad(?![A-Za-z]))+|(?:\s|\\q?quad(?![A-Za-z]))+$", "", text)


def expand_plus_minus(text: str) -> list[str]:
    r"""The two values of a text with one \pm, or with a \pm and a \mp; else only the text."""
    signs = sorted(match[1] for match in _SIGNS.finditer(text))
    if signs not in (["pm"], ["mp"], ["mp", "pm"]):
        return [text]

    def written(upper: bool) -> str:
        def sign(match: re.Match[str]) -> str:
            before = text[: match.start()].rstrip()
            plus = "+" if before and before[-1] not in "=({[," else ""
            return plus if (match[1] == "pm") is upper else "-"

        return _SIGNS.sub(sign, text)

    return [written(True), written(False)]


def strip_brackets(text: str, opening: str, closing: str) -> str | None:
    """What stands between a bracket at the start and its partner at the end, if that is all."""
    if not text.startswith(opening) or not text.endswith(closing):
        return None
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if depth == 0:
            return text[len(opening) : -len(closing)] if token.end() == len(text) else None
    return None


@lru_cache(maxsize=2048)
def read(text: str) -> AnswerList | None:
    """The list that a text is; a single value is one of one. None: too long."""
    text = text.strip()
    within = strip_brackets(_NAME_OF_A_SET.sub("", text), "\\{", "\\}")
    braces = within is not None and not _BUILDER.search(within)
    if parse_number(text) is not None:  # 1,000
        parts = [text]
    else:
        parts = split(within if within is not None and braces else text)
    if len(parts) > MAX_ELEMENTS:
        return None
    for rule in PARTS:
        parts = [one for part in parts for one in rule.apply(part)]
    found = [_element(part) for part in parts]
    for rule in GROUPS:
        found = rule.apply(found)
    return AnswerList(tuple(found), braces)


def _element(part: str) -> Element:
    read_as = (rule.apply(part) for rule in ELEMENTS)
    return next((one for one in read_as if one is not None), Element(part, ("",), (part,)))


def _named_tuple(part: str) -> Element | None:
    match = _NAMED_TUPLE.fullmatch(part)
    names = tuple(name.strip() for name in match[1].split(",")) if match else ()
    values = tuple(split(strip_brackets(match[2], "(", ")") or "")) if match else ()
    return Element(part, names, values) if names and len(names) == len(values) else None


def _named_value(part: str) -> Element | None:
    match = _NAMED.fullmatch(part)
    return Element(part, (match[1],), (match[2].strip(),)) if match else None


def _tuple(part: str) -> Element | None:
    values = tuple(split(strip_brackets(part, "(", ")") or ""))
    return Element(part, ("",) * len(values), values) if len(values) > 1 else None


def _ratio(part: str) -> Element | None:
    terms = tuple(_split(part, lambda token: token[0] == ":"))
    return Element(part, ("",) * len(terms), terms, ratio=True) if len(terms) > 1 else None


def _group_by_name(found: list[Element]) -> list[Element]:
    names = [name for one in found for name in one.names]
    if "" in (one.names[0] for one in found) or len(set(names)) == 1:
        return found
    groups: list[list[Element]] = [[]]
    for one in found:
        if {name for other in groups[-1] for name in other.names} & set(one.names):
            groups.append([])
        groups[-1].append(one)
    return [
        Element(
            ", ".join(one.text for one in group),
            tuple(name for one in group for name in one.names),
            tuple(value for one in group for value in one.values),
        )
        for group in groups
    ]


def union_of_relations(text: str) -> tuple[str, str] | None:
    r"""The name and the union of intervals of relations in one name with "or" between.

    >>> union_of_relations(r"x \leq 2 \text{ or } 3 < x < 5")
    ('x', '(-\\infty,2]\\cup(3,5)')
    """
    parts = split(text)
    if len(parts) < 2 or len(_OR.findall(text)) != len(parts) - 1:
        return None
    names, intervals = set(), []
    for part in parts:
        match = _RELATION.fullmatch(part)
        if match is None or not (match["before"] or match["after"]):
            return None
        bounds = {">": ("-\\infty", False), "<": ("\\infty", False)}
        # `>` holds the bound below, `<` the one above: 3 < x is x > 3.
        for value, sign, flip in ((match["left"], match["before"], True),
                                  (match["right"], match["after"], False)):  # fmt: skip
            if sign:
                closed = "e" in sign
                less = ("<" in sign or "l" in sign[1:2]) is not flip
                key = "<" if less else ">"
                if "infty" not in bounds[key][0]:
                    return None  # both are above, or both below
                bounds[key] = (value.strip(), closed)
        (low, low_closed), (high, high_closed) = bounds[">"], bounds["<"]
        intervals.append(f"{'[' if low_closed else '('}{low},{high}{']' if high_closed else ')'}")
        names.add(match["name"])
    return (names.pop(), r"\cup".join(intervals)) if len(names) == 1 else None


# fmt: off
#: Part of a list -> parts.
PARTS: tuple[Rule, ...] = (
    Rule("plus-minus", "Read 2 \\pm 1 as its two values.", expand_plus_minus,
        right=((r"2+\sqrt{3},2-\sqrt{3}", r"2\pm\sqrt{3}"), ("(1,-1),(-1,1)", r"(\pm 1,\mp 1)")),
        near_misses=((r"\pm 5", "5"), (r"2+\sqrt{3}", r"2\pm\sqrt{3}"),
        ("(1,1),(-1,-1)", r"(\pm 1,\mp 1)"))),
)
#: Part -> element, or None: not of this kind.
ELEMENTS: tuple[Rule, ...] = (
    Rule("named tuple", "Read (x, y) = (1, 2) as two named values.", _named_tuple,
        right=(("(p,q)=(7,2),(5,2)", "p=5,q=2;p=7,q=2"),
        ("(f(n),g(n))=(n,1)", "$f(n)=n$, $g(n)=1$")),
        near_misses=(("(p,q)=(5,2),(2,7)", "p=5,q=2;p=7,q=2"),)),
    Rule("named value", "Read x = 1 as a named value.", _named_value,
        right=(("k=45,n=2", "n=2,k=45"),), near_misses=(("n=45,k=2", "k=45,n=2"),
        ("y=1,x=2", "1,2"))),
    Rule("tuple", "Read (1, 2) as two values in order.", _tuple,
        right=(("(3,2),(1,1)", "$(1,1), (3,2)$"), ("(x+1,2)", "1+x,2")),
        near_misses=(("(2,1)", "(1,2)"),
        ("(32, 349)", "32349"), ("(1,2]", "1,2"))),
    Rule("ratio", "Read 1 : 2 as two values in order.", _ratio,
        right=((r"\sqrt{5} : 2 \cdot \sqrt{2} : 3", r"\sqrt{5} : 2\sqrt{2} : 3"),),
        near_misses=(("3:2", "2:3"), ("(2,3)", "2:3"), ("2,3", "2:3"), ("23", "2:3"))),
)
#: Elements -> elements.
GROUPS: tuple[Rule, ...] = (
    Rule("group by name", "Read p = 5, q = 2, p = 7, q = 2 as two solutions.", _group_by_name,
        right=(("p=5,q=2;p=7,q=2", r"p = 5, q = 2 \quad \text{and} \quad p = 7, q = 2"),),
        near_misses=(("p=5,p=7,q=2", r"p = 5, q = 2 \text{ and } p = 7, q = 2"),
        ("p=5,q=2,p=7,q=2", "p=5,q=7,p=2,q=2"), ("p=5,q=3,p=7,q=2", "p=5,q=2;p=7,q=3"))),
)
# fmt: on
