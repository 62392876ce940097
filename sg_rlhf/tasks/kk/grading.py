"""Grading of Knights & Knaves answers: one grader for training rewards and for evaluation.

Format (the prompt's own `<think>` counts): `</think>`, `<answer>` and `</answer>` once each, in
this order, and no further `<think>`. Answer: the words knight and knave must occur as often as
there are people, and every name must match `Name is a knight|knave`. That is the reference code's
reading. The `strict` one closes what it leaves open: "It is false that Zoey is a knight".
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Literal, get_args

from sg_rlhf.tasks.grade import Grade

Scheme = Literal["reference", "table5"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Reading = Literal["reference", "strict"]
READINGS: tuple[Reading, ...] = get_args(Reading)

# The strict reading: what may stand between two statements of a line, before one, and one itself.
_BETWEEN = re.compile(r"[,;.] (?:and )?| and |[,;.]$| (?=\(\d{1,3}\))")
_NUMBER = re.compile(r"\(?\d{1,3}[).:]?|[-\u2022]")
_STATEMENT = re.compile(rf"(?:(?:{_NUMBER.pattern}) ?)?(.+?) is a (knight|knave)", re.IGNORECASE)
_EMPHASIS = str.maketrans("", "", "*_`")

_GOLD_LINE = re.compile(r"\s*\(\d+\)\s*(\S.*?)\s+is\s+a\s+(knight|knave)\s*")


class Reason(StrEnum):
    """Why a response got its reward."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"
    BAD_FORMAT = "bad_format"


def score(
    response: str,
    solution_text_format: str,
    scheme: Scheme = "reference",
    reading: Reading = "reference",
) -> Grade:
    """Grade a response (the text after the prompt); linear in its length, defined for any text.

    | outcome                                     | `reference` | `table5` |
    |---------------------------------------------|-------------|----------|
    | every identity right                        | 1 + 2       | 1 + 2    |
    | readable, some identities right, some wrong | 1 - 1.5     | -1 - 1.5 |
    | readable, no identity right                 | 1 - 1.5     | -1 - 2   |
    | empty or unreadable answer                  | 1 - 2       | -1 - 2   |
    | bad format                                  | -1 - 2      | -1 - 2   |

    `reference`: AR-Lopti's code. `table5`: Table 5 of arXiv 2511.00066; a well-formed answer with
    some identities right is "partially correct", everything below "completely wrong". The `strict`
    reading takes Markdown emphasis, and no other words, longer names ("Mary-Ann" for Ann) or
    statements over two lines.

    Args:
        solution_text_format: the gold, "(1) Zoey is a knight\\n(2) Jack is a knave".

    Raises:
        ValueError: the gold cannot be read, or the scheme or the reading is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown reward scheme {scheme!r}, expected one of {', '.join(SCHEMES)}")
    if reading not in READINGS:
        raise ValueError(f"unknown reading {reading!r}, expected one of {', '.join(READINGS)}")
    gold = parse_answer_key(solution_text_format)
    answer = extract_answer(response)
    if answer is None:
        return _grade(-3.0, Reason.BAD_FORMAT)
    parse = _parse_roles if reading == "reference" else _parse_strictly
    roles = parse(answer, solution_text_format)
    if roles is None:
        return _grade(-1.0 if scheme == "reference" else -3.0, Reason.UNPARSEABLE)
    n_right = sum(roles[name] == role for name, role in gold.items())
    if n_right == len(gold):
        return _grade(3.0, Reason.CORRECT, answer)
    if scheme == "reference":
        return _grade(-0.5, Reason.WRONG, answer)
    return _grade(-2.5 if n_right else -3.0, Reason.WRONG, answer)


def _grade(reward: float, reason: Reason, answer: str | None = None) -> Grade:
    return Grade(
        reward=reward,
        correct=reason is Reason.CORRECT,
        reason=reason,
        extracted=answer,
        format_ok=reason is not Reason.BAD_FORMAT,
        logs={"parsed": float(answer is not None)},
    )


def extract_answer(response: str) -> str | None:
    """The text of the answer block, or None if the response breaks the format."""
    if "<think>" in response:
        return None
    # `str.count` and `str.find` keep this linear on hostile text, where a lazy regex is quadratic.
    tags = ("</think>", "<answer>", "</answer>")
    if any(response.count(tag) != 1 for tag in tags):
        return None
    think_end, start, end = (response.find(tag) for tag in tags)
    if not think_end < start < end:
        return None
    return response[start + len("<answer>") : end]


@lru_cache(maxsize=4096)
def parse_answer_key(solution_text_format: str) -> dict[str, str]:
    """Name -> "knight" or "knave" of a gold answer; else a `ValueError`. It is cached."""
    key: dict[str, str] = {}
    for line in solution_text_format.strip().split("\n"):
        match = _GOLD_LINE.fullmatch(line)
        if match is None or match.group(1) in key:
            raise ValueError(
                f"reference answer line {line[:80]!r}: expected '(i) Name is a knight' or "
                "'(i) Name is a knave', each name once"
            )
        key[match.group(1)] = match.group(2)
    return key


def _parse_roles(answer: str, solution_text_format: str) -> dict[str, str] | None:
    lowered = answer.lower()
    patterns = _name_patterns(solution_text_format)
    if lowered.count("knight") + lowered.count("knave") != len(patterns):
        return None
    roles = {}
    for name, pattern in patterns.items():
        match = pattern.search(answer)
        if match is None:
            return None
        roles[name] = match.group(1).lower()
    return roles


def _parse_strictly(answer: str, solution_text_format: str) -> dict[str, str] | None:
    """Each name once, and nothing but statements, their numbers and what stands between them."""
    names = {_plain(name): name for name in parse_answer_key(solution_text_format)}
    roles: dict[str, str] = {}
    for line in answer.split("\n"):
        for part in _BETWEEN.split(_plain(line)):
            if not part or _NUMBER.fullmatch(part):
                continue
            statement = _STATEMENT.fullmatch(part)
            name = names.pop(statement[1], None) if statement else None
            if statement is None or name is None:
                return None
            roles[name] = statement[2]
    return None if names else roles


def _plain(text: str) -> str:
    """Lower case, single spaces, and without Markdown's emphasis."""
    return " ".join(text.translate(_EMPHASIS).lower().split())


@lru_cache(maxsize=4096)
def _name_patterns(solution_text_format: str) -> dict[str, re.Pattern[str]]:
    return {
        name: re.compile(rf"\b{re.escape(name)}\b\s+is\s+a\s+(knight|knave)\b", re.IGNORECASE)
        for name in parse_answer_key(solution_text_format)
    }
