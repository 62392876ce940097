"""Every rule of the grader on its own examples: right ones are accepted, near misses are not."""

from collections import Counter

import pytest

from sg_rlhf.tasks.math.answers.compare import RULES
from sg_rlhf.tasks.math.grading import Reason, grade
from tests.unit.tasks.math.switched_off import reason_without

RIGHT = [(rule.name, *pair) for rule in RULES for pair in rule.right]
NEAR_MISSES = [(rule.name, *pair) for rule in RULES for pair in rule.near_misses]
#: A near miss is rejected, and in time.
NOT_REJECTED = {Reason.CORRECT, Reason.TIMEOUT, Reason.CRASH}


@pytest.mark.parametrize(("rule", "answer", "reference"), RIGHT)
def test_right(rule, answer, reference, pool):
    assert grade(f"\\boxed{{{answer}}}", reference, pool).correct


@pytest.mark.parametrize(("rule", "answer", "reference"), NEAR_MISSES)
def test_near_misses(rule, answer, reference, pool):
    assert grade(f"\\boxed{{{answer}}}", reference, pool).reason not in NOT_REJECTED


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_without_the_rule_one_of_its_examples_fails(rule, pool):
    right = [pool.submit(reason_without, rule.name, *pair) for pair in rule.right]
    near_misses = [pool.submit(reason_without, rule.name, *pair) for pair in rule.near_misses]
    rejected = [reason.result() != Reason.CORRECT for reason in right]
    accepted = [reason.result() in NOT_REJECTED for reason in near_misses]
    assert any(rejected) or any(accepted)


def test_names_are_unique():
    assert [name for name, count in Counter(rule.name for rule in RULES).items() if count > 1] == []
