"""What is graded right, what wrong, and why."""

import pytest

from sg_rlhf.tasks.math.answers.normalize import normalize, parse_number
from sg_rlhf.tasks.math.answers.worker import compare
from sg_rlhf.tasks.math.grading import Grade, Reason, grade, grade_many

# answer, gold
RIGHT = {
    "equation, moved": ("x+y-5=0", "x+y=5"),
    "equation, scaled": ("2x+2y=10", "x+y=5"),
    "equation, swapped": ("5=x", "x=5"),
    "value for its name": ("5=x", "5"),
    "value in a gold for its name": ("5", "5=x"),
    "relation for an interval": (r"x \geq 2", r"[2,\infty)"),
    "strict relation for an interval": ("x>2", r"(2,\infty)"),
    "variable's range": (r"x \in [-2,\frac{14}{2}]", r"x \in [-2,7]"),
    "derivative, reordered": (r"\frac{dx}{dt}=-a+kx", r"\frac{dx}{dt} = kx - a"),
    "prime": ("y'=2x", "y' = 2x"),
    "scientific, written out": ("870000000", r"8.7 \times 10^{8}"),
    "scientific, shifted": (r"87 \times 10^{7}", r"8.7 \times 10^8"),
    "scientific, small": (r"0.16 \cdot 10^{-18}", "1.6e-19"),
    "repeating decimal": (r"0.\overline{3}", r"\frac{1}{3}"),
    "gold that repeats": (r"\frac{7}{30}", r"0.2\overline{3}"),
    "grouped by negative spaces": (r"11,\! 111,\! 111,\! 100", "11111111100"),
    "grouped with a space": ("10, 000", "10000"),
    "outer braces": (r"{\frac{1}{2}}", r"\frac{1}{2}"),
    "outer braces of E notation": ("{1e-5}", "1e-5"),
    "bold": (r"\boldsymbol{5}", "5"),
    "colour": (r"\color{red}{5}", "5"),
    "underlined": (r"\underline{5}", "5"),
    "large": (r"\large 5", "5"),
    "approximately": (r"\approx 5", "5"),
    "empty set": (r"\varnothing", r"\emptyset"),
    "bare sqrt": ("-1 + sqrt(3)", r"-1+\sqrt{3}"),
    "bare pi": ("2pi", r"2\pi"),
    "unicode root": ("2√3", r"2\sqrt{3}"),
    "unicode square": ("x²", "x^2"),
    "unicode theta": ("θ", r"\theta"),
    "unicode hyphen": ("\u20103", "-3"),
    "euro": ("5€", "5"),
    "dollars in words": ("5 dollars", "5"),
    "choice with its text": (r"\textbf{(B)}\ 12", "B"),
    "no": ("No", r"\text{no}"),
    "E notation with a full stop": ("6e13.", "6e13"),
    "integer": ("142", "142"),
    "float gold": ("142", "142.0"),
    "integer gold": ("142.0", "142"),
    "leading zero gold": ("33", "033"),
    "negative float gold": ("-4", "-4.0"),
    "unicode minus": ("−4", "-4"),
    "leading point": ("0.35625", ".35625"),
    "grouped by commas": ("1,234,567", "1234567"),
    "grouped by TeX commas": ("1{,}234", "1234"),
    "grouped by thin spaces": (r"12\,345", "12345"),
    "list, not a grouped number": ("5, 15", "5,15"),
    "final full stop": ("5.", "5"),
    "dollar signs": ("$5$", "5"),
    "currency": (r"\$32,\!348", "32348"),
    "fraction": ("3/4", r"\frac{3}{4}"),
    "unreduced fraction": (r"\frac{6}{8}", r"\frac{3}{4}"),
    "dfrac": (r"\dfrac{3}{4}", r"\frac34"),
    "fraction as decimal": ("0.75", r"\frac{3}{4}"),
    "rounded third": ("0.333333", r"\frac{1}{3}"),
    "negative fraction": (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    "mixed number": (r"1\frac{1}{2}", r"\frac{3}{2}"),
    "mixed number in words": ("1 1/2", "1.5"),
    "percent for number": (r"52\%", "52"),
    "number for percent": ("52", r"52\%"),
    "decimal for percent": ("0.52", r"52\%"),
    "degrees": ("35", r"35^\circ"),
    "unit in text": (r"10\text{ cm}", "10"),
    "squared unit": (r"15 \text{ cm}^2", r"15\mbox{ cm}^2"),
    "plain unit": ("10 cm", r"10 \text{ cm}"),
    "root": (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    "power of ten": ("300000000", r"3 \times 10^{8}"),
    "computer notation": ("3e8", r"3 \times 10^{8}"),
    "large power": (r"2 \cdot 2^{1008}", "$2^{1009}$"),
    "large factorial": (r"\frac{100!}{2^{50}}", r"$\frac{100!}{2^{50}}$"),
    "polynomial": ("1+x^2", "x^2+1"),
    "expanded": ("x^2-1", "(x-1)(x+1)"),
    "equation for its value": ("x=5", "5"),
    "value for its equation": ("5", "x=5"),
    "value of a function": ("f(2)=5", "5"),
    "chain with a formula": (r"A=\pi r^2=9\pi", r"9\pi"),
    "chain of equal values": (r"x=2\cdot 3=6", "6"),
    "function": ("f(x)=x+1", "$f(x)=1+x$"),
    "right side of a function": ("2x", "y=2x"),
    "tuple": ("( 6, 31, -1 )", "(6,31,-1)"),
    "tuple of fractions": (r"\left(\frac12, 0.5\right)", r"(\frac{1}{2},\frac{1}{2})"),
    "interval": (r"\left[0,\infty\right)", r"[0,\infty)"),
    "union": (r"(-\infty,1)\cup(2,3)", r"(-\infty,1) \cup (2,3)"),
    "set in another order": (r"\{3,1,2\}", r"\{1,2,3\}"),
    "list in another order": ("60,90", r"$90^{\circ}$,$60^{\circ}$"),
    "list of tuples": ("(3,2),(1,1)", "$(1,1), (3,2)$"),
    "alternatives, all given": (r"3 \text{ or } 5", "3,5"),
    "plus or minus": (r"\pm 5", "5,-5"),
    "matrix": (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 0.5 \end{pmatrix}",
        r"\begin{pmatrix}1&2\\3&\frac{1}{2}\end{pmatrix}",
    ),
    "inequality": ("5 > x", "x < 5"),
    "inequality as interval": (r"(-\infty,5)", "x<5"),
    "equation to solve": ("0=1+x", "0=x+1"),
    "complex": ("9i+6", "6+9i"),
    "text": ("Evelyn", r"\text{Evelyn}"),
    "text in another case": (r"\text{even}", "Even"),
    "choice": ("C", r"\text{(C)}"),
    "bold choice": (r"\textbf{(C)}", "C"),
    "base": ("4210_5", "4210_{5}"),
    "base left out": ("4210", "4210_{5}"),
    "gold with line feed": ("3", "3\n"),
    "gold that no parser reads": ("t(0, 4]", "$t(0,4]$"),
    "variable after a number": ("10 t", "10t"),
    "box in a box": (r"\boxed{5}", "5"),
}

# answer, gold, reason
NOT_RIGHT = {
    "other number": ("6", "5", Reason.WRONG),
    "sign": ("-5", "5", Reason.WRONG),
    "nearly, integers": ("100000000000000000001", "100000000000000000000", Reason.WRONG),
    "rounded too far": ("0.3333", r"\frac13", Reason.WRONG),
    "interval ends": ("[0,1)", "[0,1]", Reason.WRONG),
    "tuple order": ("(2,1)", "(1,2)", Reason.WRONG),
    "half of a list": ("5", "5,15", Reason.WRONG),
    "other text": (r"\text{odd}", r"\text{even}", Reason.WRONG),
    "other choice": ("B", "C", Reason.WRONG),
    "other variable": ("y=5", "x=5", Reason.WRONG),
    "other base": ("4210_7", "4210_5", Reason.WRONG),
    "transposed": (
        r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        Reason.WRONG,
    ),
    "two numbers for one": ("1 2", "12", Reason.UNPARSEABLE),
    "empty": ("", "5", Reason.EMPTY_BOX),
    "blank": (r"\ ", "5", Reason.UNPARSEABLE),
    "half a fraction": (r"\frac{1}{", "5", Reason.NO_BOX),
    "unknown command": (r"5 \foo 5", "5", Reason.UNPARSEABLE),
    "unicode digits": ("５", "5", Reason.UNPARSEABLE),
    "division by zero": (r"\frac{1}{0}", "5", Reason.WRONG),
    "unreadable gold": ("5", "$t(0,4]$", Reason.UNREADABLE_GOLD),
    # Games: each of these holds the gold.
    "every candidate": ("1,2,3,4,5,6,7,8,9,10", "5", Reason.WRONG),
    "set of candidates": (r"\{4,5\}", "5", Reason.WRONG),
    "or": ("5 or 6", "5", Reason.WRONG),
    "or in text": (r"5 \text{ or } 6", "5", Reason.WRONG),
    "or hidden in a unit": (r"5 \text{ or 6}", "5", Reason.AMBIGUOUS),
    "words in a unit": (r"5 \text{ or six}", "5", Reason.AMBIGUOUS),
    "negation in a unit": (r"5 \text{ not six}", "5", Reason.AMBIGUOUS),
    "semicolons": ("5;6", "5", Reason.WRONG),
    "bar": ("5|6", "5", Reason.UNPARSEABLE),
    "quotes join digits": ("5'6", "56", Reason.UNPARSEABLE),
    "far spaces": (r"5 \quad 6", "30", Reason.UNPARSEABLE),
    "plus or minus": (r"\pm 5", "5", Reason.WRONG),
    "gold in a sentence": ("surely 5, not 6", "5", Reason.UNPARSEABLE),
    "gold at the end of a sentence": ("the answer is: 5", "5", Reason.WRONG),
    "false equation": ("4=5", "5", Reason.AMBIGUOUS),
    "chain of candidates": ("x=3=4=5", "5", Reason.AMBIGUOUS),
    "chain of formulas": ("y=3x=2x", "y=2x", Reason.AMBIGUOUS),
    "false equation in a list": ("7654321=3,-3", "3,-3", Reason.AMBIGUOUS),
    "false equation with a variable": ("7654321=3x+1", "3x+1", Reason.AMBIGUOUS),
    "zero equals the answer": ("0=3x+1", "3x+1", Reason.WRONG),
    "sentence about zero": ("it is surely 0 I think", "0", Reason.UNPARSEABLE),
    "two assignments": ("x=4,x=5", "5", Reason.WRONG),
    "zero for a tiny gold": ("0.0", r"1.6 \times 10^{-19}", Reason.WRONG),
    "tiny for a tiny gold": ("3^{-40}", r"1.6 \times 10^{-19}", Reason.WRONG),
    "zero for a tiny decimal": ("0.0", "0.0000001", Reason.WRONG),
    "number without its variable": ("2", "2t", Reason.WRONG),
    "other letter in its place": ("2c", "2t", Reason.WRONG),
    "boxes in a box": (r"\boxed{5},\boxed{6}", "5", Reason.UNPARSEABLE),
    "another box's text": (r"6 \boxed{5}", "5", Reason.UNPARSEABLE),
    "not a number": ("nan", "5", Reason.WRONG),
    "everything": (r"\mathbb{R}", "5", Reason.WRONG),
}


# answer, gold: what a rule for something equal must not let pass.
NEAR_MISSES = {
    "another letter's case": ("1", r"\frac{R}{r}"),
    "a variable's case": ("2N", "2n"),
    "a name's case": (r"W \text{ and } z", r"W \text{ and } Z"),
    "energy for Euler's number": ("E", "e"),
    "sum behind a unit": (r"5\text{ cm}+7\text{ cm}", "5"),
    "list behind a unit": (r"5\text{ cm}, 7\text{ cm}", "5"),
    "derivative left out": ("kx=a", r"\frac{dx}{dt} = kx - a"),
    "partial derivative left out": ("k=0", r"\frac{\partial u}{\partial t}=k"),
    "second derivative for the first": (r"\frac{d^2y}{dt^2}=k", r"\frac{dy}{dt}=k"),
    "prime left out": ("y=2x+y", "y'=2x+y"),
    "list read as a number": ("32, 349", "32349"),
    "tuple read as a number": ("(32, 349)", "32349"),
    "another equation": ("x+y-6=0", "x+y=5"),
    "equation with another sign": ("x-y=5", "x+y=5"),
    "trivial equation": ("0=0", "x+y=5"),
    "another variable, swapped": ("5=y", "x=5"),
    "open for closed": ("x > 2", r"[2,\infty)"),
    "relation the other way": (r"x \leq 2", r"[2,\infty)"),
    "another mantissa": (r"8.8 \times 10^{8}", r"8.7 \times 10^{8}"),
    "another power": (r"8.7 \times 10^{7}", r"8.7 \times 10^{8}"),
    "another small mantissa": (r"1.7 \times 10^{-19}", "1.6e-19"),
    "fewer repeating digits": ("0.33", r"0.\overline{3}"),
    "styled digit beside another": (r"2\boldsymbol{3}", "23"),
    "another choice with text": ("(C) 12", "B"),
    "two choices": ("(B) or (C)", "B"),
    "choice as a factor": ("(C) + 1", "C"),
    "alternatives in capitals": (r"0.09 \text{ OR } \frac{9}{103}", "0.09"),
}


@pytest.mark.parametrize(("answer", "gold"), RIGHT.values(), ids=RIGHT)
def test_right(answer, gold, pool):
    result = grade(f"Then $\\boxed{{{answer}}}$.", gold, pool)
    assert (result.correct, result.reason) == (True, Reason.CORRECT)


@pytest.mark.parametrize(("answer", "gold"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(answer, gold, pool):
    assert not grade(f"Then $\\boxed{{{answer}}}$.", gold, pool).correct


@pytest.mark.parametrize(("answer", "gold", "reason"), NOT_RIGHT.values(), ids=NOT_RIGHT)
def test_not_right(answer, gold, reason, pool):
    result = grade(f"Then $\\boxed{{{answer}}}$.", gold, pool)
    assert (result.correct, result.reason) == (False, reason)


@pytest.mark.parametrize("gold", sorted({gold for _, gold in RIGHT.values()}))
def test_every_gold_is_its_own_answer(gold, pool):
    assert grade(f"\\boxed{{{gold}}}", gold, pool).correct


def test_only_the_last_complete_box_counts(pool):
    logs = {"timeout": 0.0, "crash": 0.0}
    for response, expected in {
        r"\boxed{5} or rather \boxed{6}": Grade(0.0, False, Reason.WRONG, "6", True, logs),
        r"\boxed{5} or rather \boxed{6": Grade(1.0, True, Reason.CORRECT, "5", True, logs),
        r"5, so output it within \boxed{}": Grade(0.0, False, Reason.EMPTY_BOX, "", True, logs),
        "5": Grade(0.0, False, Reason.NO_BOX, None, False, logs),
    }.items():
        assert grade(response, "5", pool) == expected


def test_any_gold_is_enough(pool):
    golds = [r"6.43 \times 10^{16}", r"6.43 \times 10^{16} \text{ cm}^{-3}", "x+y"]
    assert grade(r"\boxed{6.43e16}", golds, pool).correct
    assert grade(r"\boxed{y+x}", golds, pool).correct
    assert grade(r"\boxed{x-y}", golds, pool).reason is Reason.WRONG
    assert grade(r"\boxed{5,6}", ["5", "6"], pool).reason is Reason.WRONG


@pytest.mark.parametrize("golds", [[], "", " \n", ["5", ""]])
def test_missing_gold_is_an_error_of_the_data(golds):
    with pytest.raises(ValueError, match="no gold answer, or an empty one"):
        grade(r"\boxed{5}", golds)


def test_grade_many_keeps_the_order_and_reports_progress(pool):
    pairs = [(f"\\boxed{{{n}+x}}", "x+2") for n in range(5)] + [("none", "1"), (r"\boxed{1}", "1")]
    done = []
    grades = grade_many(pairs, pool, on_graded=lambda: done.append(1))
    assert [g.correct for g in grades] == [False, False, True, False, False, False, True]
    assert [g.extracted for g in grades][:2] == ["0+x", "1+x"]
    assert len(done) == 7


NUMBERS = [
    "0", "5", "-5", "05", "5.0", "5.000", "0.5", ".5", "-.5", "1/2", r"\frac{1}{2}", r"\frac12",
    "50", r"-\frac{1}{2}", "0.333333", "0.3333333", "0.333334", "1/3", "1,000", "1000", "0.1",
    "1000.0000001", "0.0000001", "0.0", "123456789012345678", "123456789012345679", "1/10",
    r"\frac{10}{100}",
]  # fmt: skip


def test_exact_numbers_decide_as_math_verify_does(pool):
    """Every pair that the fast path decides, also by math-verify."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if parse_number(a) and parse_number(b)]
    verdicts = [pool.submit(compare, normalize(a), (normalize(b),)) for a, b in pairs]
    fast = grade_many([(f"\\boxed{{{a}}}", b) for a, b in pairs], pool)
    differing = [
        pair
        for pair, verdict, result in zip(pairs, verdicts, fast, strict=True)
        if (verdict() is Reason.CORRECT) != result.correct
    ]
    assert differing == []
