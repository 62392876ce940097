"""Which training problems are also in an evaluation set: the same text, or shared runs of words.

Two checks: equal after `normalise`, and a common run of N words (13, as in the GPT-3 paper, arXiv
2005.14165, App. C). The second also finds stock phrases, so it reports the shared part.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

NGRAM = 13
# From this share of common runs on, two problems are most likely one and the same.
MOSTLY = 0.5
N_EXAMPLES = 5
# Equal text; equal or most of the runs; equal or any run. Each holds the ones before it.
LEVELS = ("exact", "mostly", "any")

Tick = Callable[[], object]
Ngram = tuple[str, ...]


class Problem(Protocol):
    """What is compared: a text, with a name for it."""

    @property
    def id(self) -> str:
        """Of the problem in its source."""

    @property
    def problem(self) -> str:
        """The bare text, without what every prompt says."""


@dataclass(frozen=True)
class Text:
    """A problem of which nothing else is known."""

    id: str
    problem: str


# Typography: what two copies of one problem differ in without meaning anything else.
_DELIMITERS = re.compile(r"\\[()\[\]]|\$|\\(?:left|right|displaystyle|limits)(?![a-z])|\\[,;:! ]")
_PUNCTUATION = re.compile(r"(?<!\d)[.,;:!?]|[.,;:!?](?!\d)|[\"'`]")
_FRACTION = re.compile(r"\\[dt](frac|binom)")
# A command loses its backslash: "\cos" and "cos" are one word.
_WORD = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)?")


def normalise(problem: str) -> str:
    """A problem without case, white space, punctuation, dollar signs and quotes; signs stay."""
    text = unicodedata.normalize("NFKC", problem).casefold()
    text = text.replace("\u2212", "-").replace("\u2019", "'").replace("\u2018", "'")
    text = _FRACTION.sub(r"\\\1", _DELIMITERS.sub(" ", text))
    # Spaces go first: "(1, 2)" and "(1,2)" are the same, "(12)" is not.
    return _PUNCTUATION.sub("", "".join(text.split()))


def words(problem: str) -> list[str]:
    """The words and numbers of a problem, in lower case; signs and LaTeX's delimiters are gone."""
    return _WORD.findall(_DELIMITERS.sub(" ", unicodedata.normalize("NFKC", problem).casefold()))


def ngrams(problem: str, n: int = NGRAM) -> set[Ngram]:
    """All runs of `n` words; none for a shorter problem."""
    found = words(problem)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


@dataclass(frozen=True)
class Match:
    """A training problem and the evaluation problem that it repeats, by a `share` of its runs."""

    train: Problem
    test: Problem
    exact: bool
    share: float

    @property
    def levels(self) -> tuple[str, ...]:
        """The `LEVELS` that it reaches: `any`, and those above it."""
        return LEVELS[0 if self.exact else 1 if self.share >= MOSTLY else 2 :]


@dataclass
class OverlapReport:
    """What training data shares with one evaluation set of `problems` problems.

    Attributes:
        too_short: problems with fewer than N words, which only the exact check can find.
        matches: per problem the training problem that shares most, the nearest first.
        train_keys: level (see `LEVELS`) -> normalised training problems that reach it.
    """

    name: str
    problems: int
    too_short: int = 0
    matches: list[Match] = field(default_factory=list)
    train_keys: dict[str, set[str]] = field(
        default_factory=lambda: {level: set() for level in LEVELS}
    )

    def count(self, level: str) -> int:
        """How many of its problems reach this level of `LEVELS` and none above it."""
        return sum(match.levels[0] == level for match in self.matches)

    def facts(self) -> dict[str, Any]:
        """Counts and the first examples, for JSON."""
        return {
            "problems": self.problems,
            "too_short_for_ngrams": self.too_short,
            "exact": self.count("exact"),
            "mostly": self.count("mostly"),
            "some": self.count("any"),
            "train_problems": {level: len(keys) for level, keys in self.train_keys.items()},
            "examples": [
                {
                    "test_id": match.test.id,
                    "train_id": match.train.id,
                    "exact": match.exact,
                    "share": round(match.share, 3),
                    "test": match.test.problem,
                    "train": match.train.problem,
                }
                for match in self.matches[:N_EXAMPLES]
            ],
        }


def find_overlap(
    train: Iterable[Problem],
    eval_sets: Mapping[str, Sequence[Problem]],
    *,
    n: int | None = NGRAM,
    on_row: Tick | None = None,
) -> list[OverlapReport]:
    """Compare training rows with each set, by runs of `n` words (None: equal texts only)."""
    if n is not None and n < 1:
        raise ValueError(f"n-gram length must be at least 1, got {n}")
    problems = [(name, row) for name, rows in eval_sets.items() for row in rows]
    index = _Index([row.problem for _, row in problems], n)
    results = {name: OverlapReport(name, len(rows)) for name, rows in eval_sets.items()}
    for (name, _), runs in zip(problems, index.runs, strict=True):
        results[name].too_short += n is not None and not runs

    best: dict[int, Match] = {}
    seen: set[str] = set()
    for row in train:
        key = normalise(row.problem)
        if key not in seen:
            seen.add(key)
            for at, (exact, share) in index.compare(row.problem, key).items():
                name, test = problems[at]
                match = Match(row, test, exact, share)
                for level in match.levels:
                    results[name].train_keys[level].add(key)
                if at not in best or _similarity(match) > _similarity(best[at]):
                    best[at] = match
        if on_row is not None:
            on_row()

    for at, match in best.items():
        results[problems[at][0]].matches.append(match)
    for result in results.values():
        result.matches.sort(key=_similarity, reverse=True)
    return list(results.values())


class _Index:
    """Problems by their text and by their runs of `n` words (None: by text alone)."""

    def __init__(self, problems: Sequence[str], n: int | None) -> None:
        self._n = n
        self.runs = [self._runs_of(problem) for problem in problems]
        self._with_text: dict[str, list[int]] = defaultdict(list)
        self._with_run: dict[Ngram, list[int]] = defaultdict(list)
        for at, problem in enumerate(problems):
            self._with_text[normalise(problem)].append(at)
            for run in self.runs[at]:
                self._with_run[run].append(at)

    def compare(self, problem: str, key: str) -> dict[int, tuple[bool, float]]:
        """Positions that share anything with a problem (`key`: normalised) -> same text, share."""
        common = Counter(at for run in self._runs_of(problem) for at in self._with_run.get(run, ()))
        found = {at: (False, count / len(self.runs[at])) for at, count in common.items()}
        return found | dict.fromkeys(self._with_text.get(key, ()), (True, 1.0))

    def _runs_of(self, problem: str) -> set[Ngram]:
        return set() if self._n is None else ngrams(problem, self._n)


def _similarity(match: Match) -> tuple[bool, float]:
    return match.exact, match.share
