r"""Answers that are several values: 1, 2; x = 1 or x = 2; (1, 2), (3, 4); 2 \pm \sqrt{3}.

What is a list is decided here, from the text, and its elements are compared one by one: math-verify
makes a set of a list, which forgets how often an element occurs, and to which of two solutions a
named value belongs.

| gold | right | wrong |
|---|---|---|
| 1, 2 | 2, 1; {1, 2}; x = 1 or x = 2; (1, 2) | (2, 1): in brackets the order counts |
| -2, -2 | a = -2, b = -2; (-2, -2) | -2: the gold is a pair |
| 2 \pm \sqrt{3} | the two roots in any order | one of them |
| p = 5, q = 2; p = 7, q = 2 | (7, 2), (5, 2) | p = 5, p = 7, q = 2 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sg_rlhf.tasks.math.answers.normalize import parse_number

#: Whether two values are equal, (gold, answer).
Same = Callable[[str, str], bool]

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
_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:[A-Za-z0-9]|\{[^{}=]*\}))?(?:\([A-Za-z0-9]\))?"
_NAMED = re.compile(rf"({_NAME})\s*=\s*([^=<>]+)")
_NAMED_TUPLE = re.compile(rf"\(\s*({_NAME}(?:\s*,\s*{_NAME})+)\s*\)\s*=\s*(\(.*\))")
_NAME_OF_A_SET = re.compile(rf"\s*{_NAME}\s*(?:=|\\in(?![A-Za-z]))\s*(?=\\\{{)")
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")
_BUILDER = re.compile(r"\\mid(?![A-Za-z])|[|:]")


@dataclass(frozen=True)
class Element:
    """One element of a list: a value, or the values of several names, of a tuple or of a ratio.

    Attributes:
        names: as many as values; "" for a value without one.
        ratio: they stand as 1 : 2 : 3.
    """

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
    r"""The two values of a text with one \pm, or with a \pm and a \mp, which belong together.

    Only the text where there is none, or where nothing says which signs go together.
    """
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
    return AnswerList(
        tuple(_elements([one for part in parts for one in expand_plus_minus(part)])), braces
    )


def _elements(parts: Sequence[str]) -> list[Element]:
    found = list(map(_element, parts))
    named = [one for one in found if one.names[0]]
    if len(named) == len(found) and len({name for one in found for name in one.names}) > 1:
        return group_by_name(found)
    if len(named) == 1 and found[0].names[0] and all(len(one.names) == 1 for one in found):
        # x = 1, 2, 3: the name is that of all.
        return [Element(one.text, found[0].names, one.values) for one in found]
    return found


def _element(part: str) -> Element:
    if match := _NAMED_TUPLE.fullmatch(part):
        names = tuple(name.strip() for name in match[1].split(","))
        values = tuple(split(strip_brackets(match[2], "(", ")") or ""))
        if len(names) == len(values):
            return Element(part, names, values)
    if match := _NAMED.fullmatch(part):
        return Element(part, (match[1],), (match[2].strip(),))
    values = tuple(split(strip_brackets(part, "(", ")") or ""))
    if len(values) > 1:
        return Element(part, ("",) * len(values), values)
    terms = tuple(_split(part, lambda token: token[0] == ":"))
    if len(terms) > 1:
        return Element(part, ("",) * len(terms), terms, ratio=True)
    return Element(part, ("",), (part,))


def group_by_name(found: Sequence[Element]) -> list[Element]:
    """p = 5, q = 2, p = 7, q = 2 are two solutions: a name that comes again begins the next."""
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


def equal(gold: str, answer: str, same: Same) -> bool | None:
    """Whether two texts list the same; None where both are one value, or one is a set in words.

    Args:
        same: compares two single values, and elements that only one of the two takes apart.
    """
    wanted, given = read(gold), read(answer)
    if wanted is None or given is None:
        return None
    one_each = len(wanted.elements) == len(given.elements) == 1
    widths = [len(one.values) for listed in (wanted, given) for one in listed.elements]
    if one_each and 1 in widths:
        return None
    for listed, other, flipped in ((wanted, given, False), (given, wanted, True)):
        if not other.braces and len(listed.elements) == 1:
            one = listed.elements[0]
            pairs = _without_brackets(one, other.elements)
            if pairs is not None:
                in_order = not flipped or _alphabetical(one)
                return in_order and all(same(*(p[::-1] if flipped else p)) for p in pairs)
    if 1 in (len(wanted.elements), len(given.elements)) and not one_each:
        single = gold if len(wanted.elements) == 1 else answer
        # A union of intervals, a range: what it holds is for the parser to say.
        return (
            None if re.search(r"\\(?:cup|cap|in|mathbb|begin)(?![A-Za-z])|[<>]", single) else False
        )
    return _same_elements(wanted.elements, given.elements, same)


def _without_brackets(one: Element, several: Sequence[Element]) -> list[tuple[str, str]] | None:
    """The values of (1, 2), or of a = 1, b = 2, beside the elements of 1, 2, in their order."""
    if one.ratio or not 1 < len(one.values) == len(several):
        return None
    if any(other.names != ("",) for other in several):
        return None
    return list(zip(one.values, (other.text for other in several), strict=True))


def _alphabetical(solution: Element) -> bool:
    """Whether the order of its names is the usual one, in which a pair without names stands."""
    return list(solution.names) == sorted(solution.names)


def _same_elements(gold: Sequence[Element], answer: Sequence[Element], same: Same) -> bool:
    if len(answer) > len(gold):
        # A root may be named twice, but not a gold's.
        answer = list({_key(one): one for one in answer}.values())
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for wanted in gold:
        found = next((given for given in left if _same_element(wanted, given, same)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _key(solution: Element) -> str:
    return re.sub(r"\s+", "", ",".join(solution.values))


def _same_element(gold: Element, answer: Element, same: Same) -> bool:
    if len(gold.values) != len(answer.values) or gold.ratio is not answer.ratio:
        return same(gold.text, answer.text)
    if gold.names[0] and answer.names[0]:
        if sorted(gold.names) != sorted(answer.names):
            return False
        given = dict(zip(answer.names, answer.values, strict=True))
        answered = [given[name] for name in gold.names]
    elif _alphabetical(answer):
        answered = list(answer.values)
    else:
        return False
    return all(map(same, gold.values, answered))
