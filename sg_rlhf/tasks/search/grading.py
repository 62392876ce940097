"""Grading of short answers: exact match and token F1, for training and for evaluation.

Normalisation (SQuAD's, arXiv 1606.05250): lower case, ASCII punctuation removed, the articles a, an
and the removed, white space collapsed. An answer is right if it equals any gold.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.labels import decode_golds

Scheme = Literal["sign", "binary", "f1"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(answer: str | None, golds: Sequence[str], scheme: Scheme = "sign") -> Grade:
    """Grade the answer that a dialogue ended with; None means that it ended without one.

    | scheme   | right | wrong | no answer |                            |
    |----------|-------|-------|-----------|----------------------------|
    | `sign`   | +1    | -1    | -1        | Eq. 20 of arXiv 2511.00066 |
    | `binary` | 1     | 0     | 0         | Search-R1's                |
    | `f1`     | 1     | F1    | 0         | partial credit             |

    `correct` is exact match and `logs["f1"]` the best token F1 over the golds in every scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown reward scheme {scheme!r}, expected one of {', '.join(SCHEMES)}")
    if not golds:
        raise ValueError("no reference answer, expected at least one")
    correct = answer is not None and any(_is_match(answer, gold) for gold in golds)
    f1 = 0.0 if answer is None else max(token_f1(answer, gold) for gold in golds)
    reward = float(correct)
    if scheme == "f1":
        reward = 1.0 if correct else f1
    elif scheme == "sign" and not correct:
        reward = -1.0
    wrong = "no_answer" if answer is None else "wrong"
    return Grade(
        reward=reward,
        correct=correct,
        reason="correct" if correct else wrong,
        extracted=answer,
        format_ok=bool(answer),
        logs={"f1": f1},
    )


def normalise(text: str) -> str:
    """The text in the form that is compared."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words after normalisation; 1 for a match."""
    if _is_match(answer, gold):
        return 1.0
    found, wanted = normalise(answer).split(), normalise(gold).split()
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def occurs_in(answer: str, text: str) -> bool:
    """Whether the words of an answer stand in a text, one after the other."""
    words = normalise(answer)
    return bool(words) and f" {words} " in f" {normalise(text)} "


@lru_cache(maxsize=4096)
def parse_golds(label: str) -> tuple[str, ...]:
    """The gold answers of an `answer` field; ValueError unless it is a JSON array of strings."""
    golds = decode_golds(label)
    if golds is None:
        raise ValueError(
            f"reference answers {label[:80]!r}: expected a JSON array of strings such as "
            '["Beijing", "Peking"]'
        )
    return golds


def _is_match(answer: str, gold: str) -> bool:
    wanted = normalise(gold)
    if wanted:
        return normalise(answer) == wanted
    # "A" or "The The" would otherwise equal every answer without a word, the empty one included.
    return " ".join(answer.lower().split()) == " ".join(gold.lower().split())
