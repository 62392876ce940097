"""Every rule of the grader on its own examples: right ones are accepted, near misses are not."""

from collections import Counter

import pytest

from sg_rlhf.tasks.math.answers.table import RULES
from sg_rlhf.tasks.math.grading import grade

RIGHT = [(rule.name, *pair) for rule in RULES for pair in rule.right]
NEAR_MISSES = [(rule.name, *pair) for rule in RULES for pair in rule.near_misses]


@pytest.mark.parametrize(("rule", "answer", "reference"), RIGHT)
def test_right(rule, answer, reference, pool):
    assert grade(f"\\boxed{{{answer}}}", reference, pool).correct


@pytest.mark.parametrize(("rule", "answer", "reference"), NEAR_MISSES)
def test_near_misses(rule, answer, reference, pool):
    assert not grade(f"\\boxed{{{answer}}}", reference, pool).correct


def test_names_are_unique_and_every_rule_has_an_example():
    assert [name for name, count in Counter(rule.name for rule in RULES).items() if count > 1] == []
    assert [rule.name for rule in RULES if not rule.right and not rule.near_misses] == []
