"""How grading a mathematics answer can end."""

from __future__ import annotations

from enum import StrEnum


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
