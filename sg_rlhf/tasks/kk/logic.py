"""Knights & Knaves statements: parsing, truth and solving.

A puzzle of n people is a tuple of n statements, one per speaker, in the form of the official data
set (K-and-K/knights-and-knaves, arXiv 2410.23123):

    ('telling-truth', i)    person i is a knight
    ('lying', i)            person i is a knave
    ('not', s)
    ('and', s, s, ...)      two or more
    ('or', s, s, ...)       two or more
    ('->', a, b)            if a then b
    ('<=>', a, b)

An assignment is a tuple of n booleans, True for a knight. It satisfies the puzzle iff for every
speaker "the speaker is a knight" equals "the speaker's statement is true".
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from sg_rlhf.common.text import truncate

Statement: TypeAlias = tuple[Any, ...]
Assignment: TypeAlias = tuple[bool, ...]

MIN_PEOPLE = 2
MAX_PEOPLE = 12

LEAVES = ("telling-truth", "lying")
# Number of sub-statements of each connective; None stands for two or more.
_ARITY: dict[str, int | None] = {"not": 1, "and": None, "or": None, "->": 2, "<=>": 2}


class PuzzleError(ValueError):
    """A puzzle that cannot be read, solved or generated; the message is meant for the user."""


def parse_statements(text: Any) -> tuple[Statement, ...]:
    """One statement per speaker as nested tuples, from a Python literal, tuples, lists or arrays.

    Raises:
        PuzzleError: naming the speaker and what was expected.
    """
    if isinstance(text, str):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise PuzzleError(
                f"statements are not a Python literal: {truncate(text, 80)}"
            ) from None
    else:
        value = text
    items = _as_sequence(value)
    if items is None or not items:
        raise PuzzleError(
            f"statements must be a tuple of one statement per person: {truncate(value, 80)}"
        )
    if len(items) > MAX_PEOPLE:
        raise PuzzleError(f"{len(items)} people, at most {MAX_PEOPLE} are supported")
    try:
        return tuple(_parse(item, speaker, len(items)) for speaker, item in enumerate(items))
    except RecursionError:
        raise PuzzleError("statements are nested too deeply") from None


def evaluate(statement: Statement, assignment: Sequence[bool]) -> bool:
    """Truth of one statement under an assignment (True = knight)."""
    return bool(truth_mask(statement, [int(knight) for knight in assignment], 1))


def solve(statements: Sequence[Statement]) -> list[Assignment]:
    """All assignments that satisfy a puzzle, knights first (the order of `product((True, False))`).

    Bit k of a mask is the truth value under the k-th assignment.
    """
    n = len(statements)
    if not 1 <= n <= MAX_PEOPLE:
        raise PuzzleError(f"{n} people, 1 to {MAX_PEOPLE} are supported")
    knights, full = knight_masks(n)
    consistent = full
    for speaker, statement in enumerate(statements):
        consistent &= full ^ knights[speaker] ^ truth_mask(statement, knights, full)
    return [assignment_at(k, n) for k in _set_bits(consistent)]


@lru_cache(maxsize=MAX_PEOPLE)
def knight_masks(n: int) -> tuple[tuple[int, ...], int]:
    """Truth tables of "person i is a knight" for n people, and the table that is always true."""
    size = 1 << n
    masks = tuple(sum(1 << k for k in range(size) if not k >> (n - 1 - i) & 1) for i in range(n))
    return masks, (1 << size) - 1


def truth_mask(statement: Statement, knights: Sequence[int], full: int) -> int:
    """Truth table of a statement, one bit per assignment, from the tables of `knight_masks`."""
    tag = statement[0]
    if tag == "telling-truth":
        return knights[statement[1]]
    if tag == "lying":
        return full ^ knights[statement[1]]
    mask = truth_mask(statement[1], knights, full)
    if tag == "not":
        return full ^ mask
    for part in statement[2:]:
        other = truth_mask(part, knights, full)
        if tag == "and":
            mask &= other
        elif tag == "or":
            mask |= other
        elif tag == "->":
            mask = (full ^ mask) | other
        elif tag == "<=>":
            mask = full ^ mask ^ other
        else:
            raise PuzzleError(f"unknown connective {tag!r}")
    return mask


def assignment_at(k: int, n: int) -> Assignment:
    """The k-th assignment of n people in the order of `product((True, False), repeat=n)`."""
    return tuple(not k >> (n - 1 - i) & 1 for i in range(n))


def canonical(statement: Statement, names: Sequence[str] | None = None) -> Statement:
    """A statement with the operands of and, or and <=> sorted; `names` replace indices."""
    tag = statement[0]
    if tag in LEAVES:
        return (tag, statement[1] if names is None else names[statement[1]])
    parts = [canonical(part, names) for part in statement[1:]]
    if tag in ("and", "or", "<=>"):
        parts.sort(key=repr)
    return (tag, *parts)


def _parse(value: Any, speaker: int, n: int) -> Statement:
    items = _as_sequence(value)
    if not items or not isinstance(items[0], str):
        raise PuzzleError(
            f"statement of person {speaker}: expected (connective, ...), got {truncate(value, 80)}"
        )
    tag, rest = str(items[0]), items[1:]
    if tag in LEAVES:
        if len(rest) == 1 and not isinstance(rest[0], bool):
            try:
                person = operator.index(rest[0])
            except TypeError:
                person = -1
            if 0 <= person < n:
                return (tag, person)
        raise PuzzleError(
            f"statement of person {speaker}: '{tag}' needs one person, 0 to {n - 1}, "
            f"got {truncate(value, 80)}"
        )
    if tag not in _ARITY:
        expected = ", ".join((*LEAVES, *_ARITY))
        raise PuzzleError(
            f"statement of person {speaker}: unknown connective {tag!r}, expected {expected}"
        )
    arity = _ARITY[tag]
    if len(rest) != arity if arity is not None else len(rest) < 2:
        raise PuzzleError(
            f"statement of person {speaker}: '{tag}' needs {arity or 'two or more'} statements, "
            f"got {truncate(value, 80)}"
        )
    return (tag, *(_parse(part, speaker, n) for part in rest))


def _as_sequence(value: Any) -> list[Any] | None:
    # numpy arrays (parquet) and lists (JSON) hold the same structure as the official tuples.
    if isinstance(value, (str, bytes)):
        return None
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    return list(value) if isinstance(value, (list, tuple)) else None


def _set_bits(mask: int) -> list[int]:
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest.bit_length() - 1)
        mask ^= lowest
    return bits
