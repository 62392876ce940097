"""What a verdict and a rule of the grader are. `answers.compare` lists all rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias


class Reason(StrEnum):
    """Why an answer is right or not. Only `CORRECT` is right.

    | reason            | meaning                                                                |
    |-------------------|------------------------------------------------------------------------|
    | `correct`         | equal to a gold answer                                                 |
    | `wrong`           | readable, equal to none                                                |
    | `no_box`          | the response has no complete box                                       |
    | `empty_box`       | the last complete box holds nothing                                    |
    | `unparseable`     | not an expression that math-verify can read                            |
    | `ambiguous`       | unequal sides such as `4=5`                                            |
    | `code_like`       | holds Python, which never reaches a parser                             |
    | `too_long`        | more characters or digits than are graded                              |
    | `too_complex`     | nesting, powers or factorials beyond what is evaluated                 |
    | `unreadable_gold` | not the gold's own text, and math-verify can read no gold of the row   |
    | `timeout`         | no verdict within the limit; the worker was killed and replaced        |
    | `crash`           | the worker died, ran out of memory or could not be started             |
    """

    CORRECT = "correct"
    WRONG = "wrong"
    NO_BOX = "no_box"
    EMPTY_BOX = "empty_box"
    UNPARSEABLE = "unparseable"
    AMBIGUOUS = "ambiguous"
    CODE_LIKE = "code_like"
    TOO_LONG = "too_long"
    TOO_COMPLEX = "too_complex"
    UNREADABLE_GOLD = "unreadable_gold"
    TIMEOUT = "timeout"
    CRASH = "crash"


#: (answer, reference answer).
Pairs: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rule:
    """One rule: what it `does`, in one sentence, and pairs that it decides.

    Attributes:
        apply: the rule; the table that holds it says what it takes and returns.
        right: (answer, reference) that must be graded correct.
        near_misses: pairs that look alike and must not.
    """

    name: str
    does: str
    apply: Callable[..., Any]
    right: Pairs = ()
    near_misses: Pairs = ()


def rewrite(
    name: str, does: str, pattern: str, replacement: str, right: Pairs = (), near_misses: Pairs = ()
) -> Rule:
    """A rule that replaces each match of a regular expression."""
    compiled = re.compile(pattern)
    return Rule(name, does, lambda text: compiled.sub(replacement, text), right, near_misses)
