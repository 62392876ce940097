"""Rewrites keep the value, mutations change it, and the same seed makes the same answers."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from experiments.graders.mutations import MUTATIONS, REWRITES, certified, exact, make
from experiments.graders.self_grading import Gold

TEXTS = ("12", "-3", "1500", "3.25", "\\frac{3}{8}", "2n+1", "x^2-\\sqrt{3}x", "1,2,3", "[2,5)",
         "\\frac{\\pi}{4}", "(1, -2)")  # fmt: skip
GOLDS = [Gold("file", row, 0, text) for row, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("-12", -12), ("2.50", Fraction(5, 2)), ("-\\frac{3}{6}", Fraction(-1, 2)),
     ("7/3", Fraction(7, 3)), ("\\frac{1}{0}", None), ("2n", None), ("1e5", None)],
)  # fmt: skip
def test_exact_values(text, value):
    assert exact(text) == value


@pytest.mark.parametrize(
    ("gold", "changed", "sure"),
    [
        ("3", "4", True),
        ("1/2", "0.5", False),
        ("3.0", "3.0001", False),
        ("1,2,3", "3,2,1", False),
        ("1,2,3", "1,2", True),
        ("1,3,3", "1,3", False),
        ("2n+2", "2(n+1)", False),
        ("2n+1", "2N+1", True),
        ("\\frac{x^2-1}{x-1}", "x+1", False),
        ("\\sqrt{8}", "2\\sqrt{2}", False),
        ("2\\pi r", "2\\pi R", True),
        ("[2,5)", "[2,5]", True),
        ("(2,5)", "(2,5]", False),
        ("\\text{yes}", "\\text{no}", False),
    ],
)
def test_a_certificate_is_given_only_to_what_differs(gold, changed, sure):
    assert certified(gold, changed, random.Random(0)) is sure


@pytest.mark.parametrize("name", [n for n in REWRITES if n.startswith("number")])
def test_rewrites_of_numbers_keep_their_value(name):
    rng = random.Random(1)
    seen = 0
    for text in ("12", "-3", "1500", "-240", "3.25", "\\frac{3}{8}", "-7/4"):
        answer = REWRITES[name](text, rng)
        if answer is None:
            continue
        seen += 1
        bare = answer.replace("{,}", "").replace(",\\!", "").replace("\\,", "").replace(",", "")
        mantissa, _, power = bare.partition(" \\times 10^{")
        sides = [side.strip() for side in mantissa.split("=") if exact(side) is not None]
        scale = 10 ** int(power.rstrip("}")) if power else 1
        assert exact(sides[0]) * scale == exact(text), answer
    assert seen


def test_the_same_seed_makes_the_same_answers():
    first = make(GOLDS, MUTATIONS, 20, False, 7)
    assert first == make(GOLDS, MUTATIONS, 20, False, 7)
    assert first != make(GOLDS, MUTATIONS, 20, False, 8)
    assert all(made.answer != made.gold.text for made in first)


def test_golds_that_are_too_few_are_named():
    with pytest.raises(ValueError, match="of 900 could be made of 11 golds"):
        make(GOLDS, REWRITES, 900, True, 0)
