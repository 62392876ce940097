"""A rule's effect: the verdicts that change without it, and no others."""

from experiments.graders.ablate import effects
from experiments.graders.suites import boxed


def test_a_rule_gets_the_verdicts_that_change_without_it():
    answers = [
        ("a", boxed("10 cm", "10", True)),
        ("a", boxed("5", "5", True)),
        ("b", boxed("2t", "2", False)),
        ("b", boxed("4=5", "5", False)),
    ]
    verdicts, changes = effects(answers, {"units", "inconsistent chain"})
    assert verdicts == [True, True, False, False]
    assert changes == {"units": [(0, False)], "inconsistent chain": [(3, True)]}
