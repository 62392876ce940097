"""The verdict of a grading worker: an answer compared with each reference answer.

Both are read as lists (`lists`), and their values compared one by one (`symbolic`). Imports sympy,
which takes seconds and memory: not for trainers.

`RULES` has all rules of the grader, in the order of their use:

| table | a rule takes | and returns |
|---|---|---|
| `normalize.REWRITES`, `VALUES` | an answer or a reference answer | the same, in one spelling |
| `normalize.CANONICAL` | a normalised text | a text, for comparing texts |
| `normalize.EXACT` | answer, reference | a verdict, another pair, or None: undecided |
| `guards.GUARDS` | a normalised answer | the reason for rejecting it, or None |
| `lists.PARTS`, `ELEMENTS`, `GROUPS` | parts of a list | parts, elements |
| `UNIONS`, `COMPARISONS` | two texts, two lists | a verdict or None |
| `symbolic.SYMBOLS` | a single value | the same, with plain symbols |
| `symbolic.ALONE`, `TOGETHER` | sympy objects | a verdict or None |
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from sg_rlhf.tasks.math.answers import guards, lists, normalize, symbolic
from sg_rlhf.tasks.math.answers.lists import NAME, AnswerList, Element, read, union_of_relations
from sg_rlhf.tasks.math.answers.normalize import equal_exactly
from sg_rlhf.tasks.math.answers.rules import Reason, Rule

#: The verdicts on single values so far.
Seen = set[Reason]

_RANGE = re.compile(r"\\(?:cup|cap|in|mathbb|begin)(?![A-Za-z])|[<>]")
_UNION_SIGN = re.compile(r"\\cup(?![A-Za-z])")
_ELEMENT_OF = re.compile(rf"\s*({NAME})\s*\\in(?![A-Za-z])")
# 1:10 may be a time of day, and 2:20 another.
_TIME = re.compile(r"[0-2]?[0-9]:[0-5][0-9]")


def warm_up() -> None:
    """Let the parser build its tables: half of the time to a first answer."""
    for text in (r"\frac{1}{2}", "x=5", "(1,2]", r"\sqrt{3}x^2"):
        compare_with_any(text, (text,))


def compare_with_any(answer: str, references: Sequence[str]) -> Reason:
    """Compare a normalised answer with normalised reference answers, any of which is right."""
    seen = set()
    for reference in references:
        reason = _compare_one(answer, reference)
        if reason is Reason.CORRECT:
            return reason
        seen.add(reason)
    # A fault of the answer itself comes before a fault of its reference answers.
    order = (Reason.UNPARSEABLE, Reason.AMBIGUOUS, Reason.WRONG, Reason.UNREADABLE_GOLD)
    return next(reason for reason in order if reason in seen)


def _compare_one(answer: str, reference: str) -> Reason:
    seen: Seen = set()
    listed = _same_lists(reference, answer, seen)
    if listed is None:
        return symbolic.equivalent(reference, answer)
    if listed:
        return Reason.CORRECT
    for reason in (Reason.AMBIGUOUS, Reason.UNREADABLE_GOLD, Reason.UNPARSEABLE):
        if reason in seen:
            return reason
    return Reason.WRONG


def _same(reference: str, answer: str, seen: Seen) -> bool:
    """Whether two single values are equal; adds the reason to `seen`."""
    decided = equal_exactly(answer, reference)
    if decided is None:
        reason = symbolic.equivalent(reference, answer)
    else:
        reason = Reason.CORRECT if decided else Reason.WRONG
    seen.add(reason)
    return reason is Reason.CORRECT


def _same_lists(reference: str, answer: str, seen: Seen) -> bool | None:
    """Whether two texts list the same; None where both are one value, or one is a set in words."""
    for rule in UNIONS:
        decided: bool | None = rule.apply(reference, answer, seen)
        if decided is not None:
            return decided
    wanted, given = read(reference), read(answer)
    if wanted is None or given is None:
        return None
    one_each = len(wanted.elements) == len(given.elements) == 1
    if one_each and 1 in (len(wanted.elements[0].values), len(given.elements[0].values)):
        return None
    for rule in COMPARISONS:
        verdict: bool | None = rule.apply(wanted, given, seen)
        if verdict is not None:
            return verdict
    if 1 in (len(wanted.elements), len(given.elements)) and not one_each:
        single = reference if len(wanted.elements) == 1 else answer
        # A union of intervals, a range: its elements are for the parser to find.
        return None if _RANGE.search(single) else False
    return _same_elements(wanted.elements, given.elements, seen)


def _same_union(reference: str, answer: str, seen: Seen) -> bool | None:
    for text, other in ((reference, answer), (answer, reference)):
        found = union_of_relations(text)
        if found is None or not _UNION_SIGN.search(other):
            continue
        name, union = found
        other_name = _ELEMENT_OF.match(other)
        if other_name:
            if other_name[1] != name:
                return False
            other = other[other_name.end() :]
        pair = (union, other) if text is reference else (other, union)
        return _same(*pair, seen)
    return None


def _without_brackets(wanted: AnswerList, given: AnswerList, seen: Seen) -> bool | None:
    for listed, other, flipped in ((wanted, given, False), (given, wanted, True)):
        one, several = listed.elements[0], other.elements
        if other.braces or len(listed.elements) > 1 or one.ratio or len(one.values) == 1:
            continue
        if len(one.values) == len(several) and all(part.names == ("",) for part in several):
            if flipped and not _alphabetical(one):
                return False
            for value, part in zip(one.values, several, strict=True):
                pair = (part.text, value) if flipped else (value, part.text)
                if not _same(*pair, seen):
                    return False
            return True
    return None


def _same_ratio(wanted: AnswerList, given: AnswerList, seen: Seen) -> bool | None:
    r, a = wanted.elements[0], given.elements[0]
    if not (r.ratio and a.ratio and len(r.values) == len(a.values)) or _TIME.fullmatch(r.text):
        return None
    products = [
        (f"({r.values[0]})*({x})", f"({a.values[0]})*({y})")
        for x, y in zip(a.values[1:], r.values[1:], strict=True)
    ]
    multiple = not _same("0", a.values[0], seen) and all(_same(*pair, seen) for pair in products)
    return True if multiple else None


def _alphabetical(element: Element) -> bool:
    """Whether the order of its names is the usual one, in which a pair without names stands."""
    return list(element.names) == sorted(element.names)


def _same_elements(reference: Sequence[Element], answer: Sequence[Element], seen: Seen) -> bool:
    if len(answer) > len(reference):
        # A root may be named twice, but not a reference answer's.
        answer = list({re.sub(r"\s+", "", ",".join(one.values)): one for one in answer}.values())
    if len(reference) != len(answer):
        return False
    left = list(answer)
    for wanted in reference:
        found = next((given for given in left if _same_element(wanted, given, seen)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_element(reference: Element, answer: Element, seen: Seen) -> bool:
    if len(reference.values) != len(answer.values) or reference.ratio is not answer.ratio:
        return _same(reference.text, answer.text, seen)
    if reference.names[0] and answer.names[0]:
        if sorted(reference.names) != sorted(answer.names):
            return False
        given = dict(zip(answer.names, answer.values, strict=True))
        answered = [given[name] for name in reference.names]
    elif _alphabetical(answer):
        answered = list(answer.values)
    else:
        return False
    return all(_same(*pair, seen) for pair in zip(reference.values, answered, strict=True))


# fmt: off
#: (reference, answer, verdicts so far) -> whether they are equal, or None.
UNIONS: tuple[Rule, ...] = (
    Rule("relations for a union", "Accept x < 2 or x > 3 for a union of intervals.", _same_union,
        right=((r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ or }x>3"),
        (r"x\le -1\text{ or }1\le x", r"(-\infty,-1]\cup[1,\infty)"),
        (r"x<2\text{ or }3<x<5", r"x\in(-\infty,2)\cup(3,5)")),
        near_misses=((r"(-\infty,2]\cup(3,\infty)", r"x<2\text{ or }x>3"),
        (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ and }x>3"),
        (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ or }y>3"),
        (r"y<2\text{ or }y>3", r"x\in(-\infty,2)\cup(3,\infty)"),
        (r"x<2", r"(-\infty,2)\cup(3,\infty)"))),
)
#: (list of the reference, of the answer, verdicts so far) -> whether they are equal, or None.
COMPARISONS: tuple[Rule, ...] = (
    Rule("brackets left out", "Accept 1, 2 in order for (1, 2).", _without_brackets,
        right=(("x=1,y=2", "(1,2)"), ("(-2,-2)", "-2,-2")), near_misses=(("x=2,y=1", "(1,2)"),
        ("(2,1)", "1,2"), (r"\{1,2\}", "(1,2)"))),
    Rule("multiple of a ratio", "Accept 4 : 6 for 2 : 3.", _same_ratio, right=(("4:6", "2:3"),
        (r"\frac12 : 1", "1:2"), ("2:4:6", "1:2:3")), near_misses=(("4:6", "3:2"), ("0:0", "2:3"),
        ("2:4:5", "1:2:3"), ("2:20", "1:10"))),
)
# fmt: on

TABLES = (
    *((normalize, name) for name in ("REWRITES", "VALUES", "CANONICAL", "EXACT")),
    (guards, "GUARDS"),
    *((lists, name) for name in ("PARTS", "ELEMENTS", "GROUPS")),
    *((sys.modules[__name__], name) for name in ("UNIONS", "COMPARISONS")),
    *((symbolic, name) for name in ("SYMBOLS", "ALONE", "TOGETHER")),
)
RULES: tuple[Rule, ...] = tuple(rule for module, name in TABLES for rule in getattr(module, name))
