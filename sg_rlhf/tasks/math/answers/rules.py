"""What one rule of the grader is. `answers.table` lists all of them in the order of their use.

A rule carries its own examples, which `tests/unit/tasks/math/test_rules.py` runs, and has a
measured effect: `python -m lab.experiments.graders.ablate` counts the verdicts that change
without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

#: (answer, reference answer).
Pairs: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: unique among all rules.
        does: what it does, in one sentence.
        apply: the rule; the table that holds it says what it takes and returns.
        right: pairs that must be graded correct.
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
