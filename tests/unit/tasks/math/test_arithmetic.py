"""Arithmetic problems: golds against Python's own arithmetic, wording, splits, worked solutions."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.math.sets.arithmetic import HELD_OUT_SHARE, Problem, generate, trace


def value_of_text(text: str) -> int:
    """An independent reading of a problem's text."""
    formula = re.search(r"\$(.*)\$", text)
    if formula:
        return eval(formula[1].replace("\\times", "*"))
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if text.startswith("The temperature"):
        return numbers[0] + numbers[1] * (1 if "rises" in text else -1)
    value, *rest = numbers
    if " in each of " in text:
        value *= rest.pop(0)
    deeds = re.findall(r"buys|gives away", text)
    assert len(deeds) == len(rest)
    return value + sum(n if deed == "buys" else -n for n, deed in zip(rest, deeds, strict=True))


@given(st.integers(0, 10**6), st.booleans(), st.integers(2, 3), st.integers(1, 4))
@settings(max_examples=25)
def test_golds_are_the_values_of_the_texts(seed, held_out, max_operands, max_digits):
    shape = {"max_operands": max_operands, "max_digits": max_digits}
    for problem in generate(8, seed, held_out=held_out, **shape):
        assert problem.gold == str(value_of_text(problem.text))
        operands = re.findall(r"\d+", problem.text)
        assert 2 <= len(operands) <= max_operands
        assert all(len(operand) <= max_digits for operand in operands)


def test_same_arguments_same_problems():
    assert generate(50, 3) == generate(50, 3)
    assert generate(50, 3) != generate(50, 4)
    # A longer list starts with the shorter one.
    assert generate(80, 3)[:50] == generate(50, 3)


def test_problems_are_unique_up_to_order_and_wording():
    made = generate(3000, 0)
    assert len({problem.key for problem in made}) == len(made)
    assert len({problem.text for problem in made}) == len(made)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((47, (("+", 85),)), (85, (("+", 47),))),
        ((47, (("+", 85), ("-", 36))), (85, (("-", 36), ("+", 47)))),
        ((7, (("\\times", 8), ("+", 5))), (8, (("\\times", 7), ("+", 5)))),
    ],
)
def test_order_does_not_make_another_problem(one, other):
    assert Problem(*one, text="a").key == Problem(*other, text="b").key


def test_other_numbers_or_signs_make_another_problem():
    chains = [
        (7, (("+", 8),)),
        (7, (("-", 8),)),
        (8, (("-", 7),)),
        (7, (("\\times", 8),)),
        (7, (("\\times", 8), ("+", 5))),
        (7, (("\\times", 8), ("-", 5))),
        (7, (("+", 8), ("+", 5))),
    ]
    assert len({Problem(*chain, text="").key for chain in chains}) == len(chains)


def test_held_out_problems_never_meet_the_others():
    train = {p.key for seed in range(5) for p in generate(2000, seed)}
    test = {p.key for seed in range(5) for p in generate(300, seed, held_out=True)}
    assert not train & test
    share = len([p for p in generate(300, 0, held_out=True) if p.held_out]) / 300
    assert share == 1.0


def test_every_kind_and_wording_comes_up():
    made = generate(2000, 0)
    kinds = Counter(" ".join(op for op, _ in problem.steps) for problem in made)
    assert len(kinds) == 3 + 3 * 2
    assert min(kinds.values()) > 20
    openings = Counter(problem.text.split()[0] for problem in made)
    assert {"What", "Compute", "Find", "Evaluate", "The", "Anna"} <= openings.keys()
    below_zero = [problem for problem in made if problem.values[-1] < 0]
    assert 0.1 < len(below_zero) / len(made) < 0.3
    assert all(value >= 0 for problem in made for value in problem.values[:-1])


@pytest.mark.parametrize(
    ("start", "steps", "slip_p", "text"),
    [
        (
            47,
            [("+", 85), ("-", 36)],
            0.0,
            "\n47 + 85: 7 + 5 = 12, 4 + 8 + 1 = 13 so 132"
            "\n132 - 36: 12 - 6 = 6, 13 - 3 - 1 = 9, 1 - 0 - 1 = 0 so 96",
        ),
        (
            24,
            [("\\times", 7)],
            0.0,
            "\n24 \\times 7: 4 \\times 7 = 28, 2 \\times 7 + 2 = 16 so 168",
        ),
        (36, [("-", 81)], 0.0, "\n36 - 81: below 0, 81 - 36: 11 - 6 = 5, 8 - 3 - 1 = 4 so -45"),
        # A slip forgets the carry or the borrow.
        (47, [("+", 85)], 1.0, "\n47 + 85: 7 + 5 = 12, 4 + 8 = 12 so 122"),
        (81, [("-", 36)], 1.0, "\n81 - 36: 11 - 6 = 5, 8 - 3 = 5 so 55"),
    ],
)
def test_worked_examples(start, steps, slip_p, text):
    found = trace(Problem(start, tuple(steps), ""), random.Random(0), slip_p=slip_p)
    assert found == f"{text}\n\\boxed{{{text.split(' so ')[-1]}}}"


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=25)
def test_work_without_slips_is_right_in_every_column(seed, max_digits):
    for problem in generate(8, seed, max_digits=max_digits):
        text = trace(problem, random.Random(0))
        assert text.endswith(f"\n\\boxed{{{problem.gold}}}")
        for left, right in re.findall(r"(?:: |, )([^:,=]+) = (-?\d+)", text):
            assert eval(left.replace("\\times", "*")) == int(right)


def test_a_guess_has_the_golds_sign_and_length_and_is_mostly_wrong():
    rng, right = random.Random(0), 0
    for problem in generate(1000, 0):
        guess = re.fullmatch(r"\nI guess \\boxed{(-?\d+)}", trace(problem, rng, "guess"))[1]
        assert len(guess.lstrip("-")) == len(problem.gold.lstrip("-"))
        assert guess.startswith("-") <= problem.gold.startswith("-")
        right += guess == problem.gold
    assert right < 60


PROBLEM = Problem(7, (("+", 8),), "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generate(-1, 0), "count must not be negative, got -1"),
        (lambda: generate(1, 0, max_operands=4), "max_operands must be 2 or 3, got 4"),
        (lambda: generate(1, 0, max_digits=0), "max_digits must be 1 to 4, got 0"),
        (lambda: generate(5000, 0, max_operands=2, max_digits=1), "found only .* different probl"),
        (lambda: trace(PROBLEM, random.Random(0), "magic"), "must be"),
        (lambda: trace(PROBLEM, random.Random(0), slip_p=1.5), "must be"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_share_held_out_is_a_tenth():
    rng = random.Random(0)
    chains = [Problem(rng.randrange(100), (("+", rng.randrange(100)),), "") for _ in range(3000)]
    share = sum(problem.held_out for problem in chains) / len(chains)
    assert share == pytest.approx(1 / HELD_OUT_SHARE, abs=0.03)
