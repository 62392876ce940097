"""Cases for graders: rewritten and mutated answers."""

from __future__ import annotations

import random
import textwrap
from fractions import Fraction

import pytest

from lab.experiments.graders import outside_cases
from lab.experiments.graders.cases import Case, read, the_formula
from lab.experiments.graders.fetch_cases import SUITES, main
from lab.experiments.graders.mutations import MUTATIONS, REWRITES, certified, exact, make
from lab.experiments.graders.self_grading import Gold
from sg_rlhf.tasks.math.grading import grade

# -- Cases are read as syntax, in every form that the suites use, and each disagreement is judged --


PYTEST = """
import pytest, somewhere_that_is_not_there

@pytest.mark.parametrize("gold, pred, expected", [
    (r"$1$", r"$\\boxed{1}$", 1), ("2", "3", 0), (somewhere.Gold(), "4", 1), ("2", "3", 0)])
def test_table(gold, pred, expected):
    assert compare(gold, pred) == expected

def test_direct():
    assert grade_answer("5.0", "5") is True
    assert grade_answer(None, "5") is False
"""
UNITTEST = """
class T:
    def test_units(self):
        test_in = "10 units"
        test_out = "10"
        self.assertFalse(is_equiv(test_in, test_out))
"""
COMMENTED = """
def _test_math_equal():
    # print(math_equal("0.5", "1/2", timeout=True))
    # pred = '1', gt = '2'
    # any other remark
    gt = "x"
    pred = "y"
"""
JSON = r'[{"output": "so \\boxed{4}", "target": "4", "expected": "I"}]'


@pytest.mark.parametrize(
    ("suite", "name", "text", "expected"),
    [
        ("math_verify", "a.py", PYTEST, {("$1$", "$\\boxed{1}$", True), ("2", "3", False),
                                         ("5", "5.0", True)}),
        ("hendrycks", "a.py", UNITTEST, {("10", "10 units", False)}),
        ("qwen", "a.py", COMMENTED, {("1/2", "0.5", None), ("2", "1", None), ("x", "y", None)}),
        ("inspect_ai", "a.json", JSON, {("4", "so \\boxed{4}", False)}),
    ],
)  # fmt: skip
def test_every_form_is_read_and_nothing_is_run(suite, name, text, expected, tmp_path):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    assert {(c.gold, c.answer, c.expected) for c in read(suite, [path])} == expected


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("$x$", "x"),
        ("the answer is $x=1$.", "x=1"),
        ("$x$ and $y$", None),
        ("12 cm", "12 cm"),
        ("I think that it is twelve", None),
        (r"\(3\)", "3"),
        (r"\$5 or $6$", "6"),
    ],
)
def test_the_formula_of_an_answer(text, formula):
    assert the_formula(text) == formula


def test_a_disagreement_without_a_verdict_is_unjudged():
    case = Case("slime", "here", "42", "41", True)
    found = grade(case.response, case.truth)
    assert outside_cases.judge(case, found, {}).kind == outside_cases.UNJUDGED
    verdict = outside_cases.Verdict(outside_cases.ARGUABLE, "off by one")
    judged = outside_cases.judge(case, found, {("slime", case.key): verdict})
    assert (judged.kind, judged.why) == (outside_cases.ARGUABLE, "off by one")
    prose = Case("slime", "here", "42", "I think that it is surely 42", True)
    found = grade(prose.response, prose.truth)
    assert outside_cases.judge(prose, found, {}).kind == outside_cases.OUT_OF_SCOPE


def test_the_committed_verdicts_are_whole():
    verdicts = outside_cases.read_verdicts()
    assert {suite for suite, _ in verdicts} <= SUITES.keys()
    assert all(v.why or v.kind == "states none" for v in verdicts.values())
    assert all(v.expected is not None for (s, _), v in verdicts.items() if s == "qwen")


def test_another_file_than_pinned_is_refused(tmp_path, capsys):
    origin = SUITES["slime"][0]
    path = tmp_path / "slime" / origin.path
    path.parent.mkdir(parents=True)
    path.write_text("changed")
    cached = tmp_path / "cache"
    for suite, origins in SUITES.items():
        for other in origins:
            folder = tmp_path / suite / other.path
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.write_text("changed")
    given = [part for s in SUITES for part in ("--from", f"{s}={tmp_path / s}")]
    assert main(["--cache", str(cached), *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "SHA-256" in error
    assert not cached.exists()


# -- Rewrites keep the value, mutations change it, and the same seed makes the same answers ------


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
