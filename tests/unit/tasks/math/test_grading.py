"""What is graded right, what wrong, and why."""

import pytest

from sg_rlhf.tasks.math.answers.compare import RULES
from sg_rlhf.tasks.math.answers.normalize import normalize, parse_number
from sg_rlhf.tasks.math.grading import Grade, Reason, compare, grade, grade_many

# (answer, reference answer) by class: what no single rule's examples say (see test_rules.py).
RIGHT = {
    "without a rule of their own": [
        (r"\\frac{1}{2}", r"\frac12"), (r"-2 \\le x \\le 7", r"x \in [-2,7]"),
        ("10110_2", "10110_{(2)}"), ("10110", "10110_{(2)}"), ("1{,}234", "1234"),
        ("17.5", "17.5%"), ("4210_5", "4210_{5}"), (r"\boxed{5}", "5"), (r"3 \text{ or } 5", "3,5"),
        ("x=1,2,3", "3,2,1"),
    ],
    "others": [
        ("x+y-5=0", "x+y=5"), ("5=x", "5"), ("5", "5=x"), ("x>2", r"(2,\infty)"),
        (r"x \in [-2,\frac{14}{2}]", r"x \in [-2,7]"), (r"87 \times 10^{7}", r"8.7 \times 10^8"),
        (r"0.16 \cdot 10^{-18}", "1.6e-19"), (r"0.\overline{3}", r"\frac{1}{3}"),
        ("10, 000", "10000"), (r"{\frac{1}{2}}", r"\frac{1}{2}"), ("‐3", "-3"), ("5 dollars", "5"),
        ("142", "142"), ("142.0", "142"), ("33", "033"), ("-4", "-4.0"), ("0.35625", ".35625"),
        ("1,234,567", "1234567"), ("5, 15", "5,15"), (r"\frac{6}{8}", r"\frac{3}{4}"),
        ("0.75", r"\frac{3}{4}"), (r"\frac{-1}{2}", r"-\frac{1}{2}"),
        (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"52\%", "52"), (r"15 \text{ cm}^2", r"15\mbox{ cm}^2"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("300000000", r"3 \times 10^{8}"),
        (r"2 \cdot 2^{1008}", "$2^{1009}$"), (r"\frac{100!}{2^{50}}", r"$\frac{100!}{2^{50}}$"),
        ("1+x^2", "x^2+1"), ("x^2-1", "(x-1)(x+1)"), ("f(x)=x+1", "$f(x)=1+x$"), ("2x", "y=2x"),
        (r"(-\infty,1)\cup(2,3)", r"(-\infty,1) \cup (2,3)"), (r"\{3,1,2\}", r"\{1,2,3\}"),
        (r"\pm 5", "5,-5"),
        (r"\begin{pmatrix} 1 \\ 0.5 \end{pmatrix}", r"\begin{pmatrix}1\\\frac{1}{2}\end{pmatrix}"),
        ("5 > x", "x < 5"), (r"(-\infty,5)", "x<5"), ("9i+6", "6+9i"), ("3", "3\n"),
        ("10 t", "10t"),
    ],
    "complex": [
        ("3+4i", "4i+3"), ("(1+i)^2", "2i"), ("-1", "i^2"), (r"2e^{i\pi/3}", r"1+i\sqrt{3}"),
        (r"\sqrt{-4}", "2i"), ("(3+4i)(3-4i)", "25"), (r"\cos\theta+i\sin\theta", r"e^{i\theta}"),
        ("z = 3+4i", "3+4i"), ("a+bi", "bi+a"),
        (r"\frac{2A}{3}(1-i)e^{it}", r"\frac{4A}{3+3i}e^{it}"),
    ],
    "plus-minus": [
        (r"2\pm\sqrt{3}", r"2-\sqrt{3},2+\sqrt{3}"),
        (r"x=2+\sqrt{3} \text{ or } x=2-\sqrt{3}", r"x=2\pm\sqrt{3}"),
        (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2},\frac{1-\sqrt{5}}{2}"),
        (r"-\frac{1}{2}\pm\frac{\sqrt3}{2}i", r"\frac{-1\pm i\sqrt{3}}{2}"),
        ("(1,2),(-1,2)", r"(\pm 1,2)"), ("-2,-1,1,2", r"\pm 1, \pm 2"), (r"\mp 5", r"\pm 5"),
    ],
    "lists": [
        ("(x,y)=(1,2)", "x=1,y=2"), ("a=-2,b=-2", "-2,-2"), ("1,1,2", "1,2"),
        (r"x \in \{3,2,1\}", r"\{1,2,3\}"),
    ],
    "units": [
        ("5 cm, 7 cm", r"5\text{ cm}, 7\text{ cm}"), (r"5\text{ cm and }7\text{ cm}", "5,7"),
        (r"(5\text{ cm}, 7\text{ cm})", "(5,7)"), (r"5 \mathrm{~kJ} / \text{mole photons}", "5"),
        (r"1.3 × 10⁻²⁷ \mathrm{~kg·m/s}", r"1.3 \times 10^{-27}"),
        (r"6630.65 \text{ Å}", "6630.65"),
        ("3:30 PM", r"3:30 \text{ p.m.}"), ("1,000.99", "1000.99"),
    ],
    "names": [
        ("b = m", "m"), ("y=2x+3", "y-2x-3=0"), ("x(t) = 2t+t", "x = 3t"),
    ],
    "derivatives": [
        (r"\dot{v} = \frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{dM}{dt} = \frac{L_{\odot} M^{6}}{7}", r"\frac{dM}{dt}=\frac{L_{\odot}}{7} M^{6}"),
    ],
    "constants": [
        (r"x = \frac{1}{3}e^{t} + Ce^{-2t}", r"x = \frac{e^{t}}{3} + ce^{-2t}"),
    ],
    "formulas": [
        (r"\sqrt{x^2}", "|x|"),
    ],
    "ranges": [
        (r"-2 \le x \le 7", r"x \in [-2,7]"),
    ],
}  # fmt: skip

NEAR_MISSES = {
    "without a rule of their own": [
        ("2^{nd}+1", "2"), ("10110_{(7)}", "10110_{(2)}"), ("175", "17.5%"), ("1.75", "17.5%"),
        (r"5 \text{ or more}", "5"), ("y=1,2,3", "x=1,2,3"),
    ],
    "others": [
        ("1", r"\frac{R}{r}"), ("E", "e"), (r"5\text{ cm}, 7\text{ cm}", "5"),
        ("k=0", r"\frac{\partial u}{\partial t}=k"), ("x-y=5", "x+y=5"),
        (r"x \leq 2", r"[2,\infty)"), (r"8.7 \times 10^{7}", r"8.7 \times 10^{8}"),
        (r"1.7 \times 10^{-19}", "1.6e-19"), (r"0.09 \text{ OR } \frac{9}{103}", "0.09"),
    ],
    "complex": [
        ("3-4i", "3+4i"), ("4+3i", "3+4i"), ("3+4x", "3+4i"), ("3+4j", "3+4i"), ("x", "i"),
        ("-1", "i"), ("2Pi", "P(1+i)^2"), ("-x", "i^2 x"), ("(1+i)^2", "2i+1"), (r"\pm i", "i"),
    ],
    "plus-minus": [
        (r"2\pm\sqrt{3}", r"2+\sqrt{3}"), (r"2\pm\sqrt{2}", r"2\pm\sqrt{3}"),
        (r"2+\sqrt{3},2+\sqrt{3}", r"2\pm\sqrt{3}"), ("5,-5,0", r"\pm 5"), ("5,5", r"\pm 5"),
        (r"\pm1\pm2", "3,-3"), (r"\pm1\pm2", "3,1,-1,-3"),
    ],
    "lists": [
        ("p=5,q=2;p=7,q=3", "p=5,q=2;p=7,q=2"), ("p=5,q=2", "p=5,q=2;p=7,q=2"),
        ("x=1,y=2", "y=1,x=2"), ("-2", "-2,-2"), ("2,2", "1,2"), ("1,2", "1,2,2"),
    ],
    "units": [
        ("5 cm", r"5\text{ cm}, 7\text{ cm}"), (r"5\text{ cm}, 7\text{ cm}", "5"),
        ("5 cm, 8 cm", r"5\text{ cm}, 7\text{ cm}"), (r"5\text{ cm} \cdot 7\text{ cm}", "5"),
        (r"5\text{cm}\frac{7}{8}", "5"), (r"5\text{ cm}7\text{ cm}", "5"), ("2 t", "2"),
        ("2m", "2"), ("2c", "2"), (r"5.4 \text{ dollars}", r"5.4 \text{ cents}"),
        (r"5\text{ squared}", "5"),
        (r"5 \text{ if n even, } 6 \text{ if n odd}", "5"),
        (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}+4"), (r"2\mathrm{e}", "2"), (r"3\text{i}", "3"),
        ("17.5%", "18"), ("1,000.98", "1000.99"),
    ],
    "names": [
        ("E_1", "E_1, E_2"), ("f(N)=n^2", "f(n)=n^2"), ("11a+c", "7=11a+c"), ("0", "a+3z=0"),
        ("g(x)=3x", "f(x)=3x"),
    ],
    "derivatives": [
        (r"\frac{dv}{dt} = \frac{f + bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{d^2v}{dt^2} = \frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        ("mv = f - bv", r"m \frac{d v}{d t}+b v=f"),
    ],
    "constants": [
        ("mC^2", "mc^2"), ("2C", "2c"), ("Cx^2", "cx^2"), (r"\frac{C}{x}+x+c", r"\frac{c}{x}+x+C"),
    ],
    "formulas": [
        (r"\sqrt{x^2}", "x"), (r"\frac{1}{a} \cosh(at)", r"\frac{e^{at}-e^{-at}}{2a}"),
    ],
    "ranges": [
        (r"2 \leq x \leq 5", "[2,5)"), ("y>2", "x>2"),
    ],
    "choices": [
        ("C", "(D) Alina"),
    ],
    "ratios": [
        ("2:3", "(2,3)"), ("8:35", "8:34"), ("6", "2:3"),
    ],
}  # fmt: skip

# Each of these also says why. Several hold the reference answer among others.
NOT_RIGHT = {
    Reason.WRONG: [
        ("6", "5"), ("-5", "5"), ("100000000000000000001", "100000000000000000000"),
        ("0.3333", r"\frac13"), ("[0,1)", "[0,1]"), ("(2,1)", "(1,2)"), ("5", "5,15"),
        (r"\text{odd}", r"\text{even}"), ("B", "C"), ("y=5", "x=5"), ("4210_7", "4210_5"),
        (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\frac{1}{0}", "5"), ("1,2,3,4,5,6,7,8,9,10", "5"), (r"\{4,5\}", "5"), ("5 or 6", "5"),
        (r"5 \text{ or } 6", "5"), (r"5 \text{ or 6}", "5"), (r"5 \text{ or six}", "5"),
        (r"5 \text{ not six}", "5"), ("5;6", "5"), (r"\pm 5", "5"), ("the answer is: 5", "5"),
        ("0=3x+1", "3x+1"), ("x=4,x=5", "5"), ("0.0", r"1.6 \times 10^{-19}"),
        ("3^{-40}", r"1.6 \times 10^{-19}"), ("0.0", "0.0000001"), ("2", "2t"), ("2c", "2t"),
        (r"\boxed{5},\boxed{6}", "5"), (r"6 \boxed{5}", "5"), ("nan", "5"), (r"\mathbb{R}", "5"),
    ],
    Reason.UNPARSEABLE: [
        ("1 2", "12"), (r"\ ", "5"), (r"5 \foo 5", "5"), ("５", "5"), ("5|6", "5"), ("5'6", "56"),
        (r"5 \quad 6", "30"), ("surely 5, not 6", "5"), ("it is surely 0 I think", "0"),
    ],
    Reason.EMPTY_BOX: [
        ("", "5"),
    ],
    Reason.NO_BOX: [
        (r"\frac{1}{", "5"),
    ],
    Reason.UNREADABLE_GOLD: [
        ("5", "$t(0,4]$"),
    ],
    Reason.AMBIGUOUS: [
        ("4=5", "5"), ("x=3=4=5", "5"), ("y=3x=2x", "y=2x"), ("7654321=3,-3", "3,-3"),
        ("7654321=3x+1", "3x+1"),
    ],
}  # fmt: skip


def cases(table):
    return [(kind, *pair) for kind, pairs in table.items() for pair in pairs]


@pytest.mark.parametrize(("kind", "answer", "gold"), cases(RIGHT))
def test_right(kind, answer, gold, pool):
    assert grade(f"\\boxed{{{answer}}}", gold, pool).correct


@pytest.mark.parametrize(("kind", "answer", "gold"), cases(NEAR_MISSES))
def test_near_misses(kind, answer, gold, pool):
    assert not grade(f"\\boxed{{{answer}}}", gold, pool).correct


@pytest.mark.parametrize(("reason", "answer", "gold"), cases(NOT_RIGHT))
def test_not_right(reason, answer, gold, pool):
    result = grade(f"Then $\\boxed{{{answer}}}$.", gold, pool)
    assert (result.correct, result.reason) == (False, reason)


def test_every_reference_answer_is_its_own_answer(pool):
    golds = {gold for _, _, gold in cases(RIGHT)} | {g for rule in RULES for _, g in rule.right}
    graded = grade_many([(f"\\boxed{{{gold}}}", gold) for gold in sorted(golds)], pool)
    assert [grade.extracted for grade in graded if not grade.correct] == []


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
    with pytest.raises(ValueError, match="no reference answer, or an empty one"):
        grade(r"\boxed{5}", golds)


def test_grade_many_keeps_the_order(pool):
    pairs = [(f"\\boxed{{{n}+x}}", "x+2") for n in range(5)] + [("none", "1"), (r"\boxed{1}", "1")]
    grades = grade_many(pairs, pool)
    assert [g.correct for g in grades] == [False, False, True, False, False, False, True]
    assert [g.extracted for g in grades][:2] == ["0+x", "1+x"]


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
        if (verdict.result() == Reason.CORRECT) != result.correct
    ]
    assert differing == []
