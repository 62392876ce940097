r"""Forms of one answer that are right, each beside near misses that must stay wrong.

Classes: complex numbers, plus-minus, lists and named values, units, names and derivatives,
constants of integration, ranges, conditions, ratios, dots.
"""

import pytest

from sg_rlhf.tasks.math.grading import grade

# (answer, gold) by class
RIGHT = {
    "complex": [
        ("3+4i", "4i+3"),
        ("(1+i)^2", "2i"),
        ("-1", "i^2"),
        ("2e^{i\\pi/3}", r"1+i\sqrt{3}"),
        (r"\sqrt{-4}", "2i"),
        ("(3+4i)(3-4i)", "25"),
        (r"\cos\theta+i\sin\theta", r"e^{i\theta}"),
        ("z = 3+4i", "3+4i"),
        ("a+bi", "bi+a"),
        (r"\frac{2A}{3}(1-i)e^{it}", r"\frac{4A}{3+3i}e^{it}"),
    ],
    "plus-minus": [
        (r"2+\sqrt{3},2-\sqrt{3}", r"2\pm\sqrt{3}"),
        (r"2\pm\sqrt{3}", r"2-\sqrt{3},2+\sqrt{3}"),
        (r"x=2+\sqrt{3} \text{ or } x=2-\sqrt{3}", r"x=2\pm\sqrt{3}"),
        (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2},\frac{1-\sqrt{5}}{2}"),
        (r"-\frac{1}{2}\pm\frac{\sqrt3}{2}i", r"\frac{-1\pm i\sqrt{3}}{2}"),
        (r"(1,2),(-1,2)", r"(\pm 1,2)"),
        (r"(1,-1),(-1,1)", r"(\pm 1,\mp 1)"),
        (r"-2,-1,1,2", r"\pm 1, \pm 2"),
        (r"\mp 5", r"\pm 5"),
    ],
    "lists": [
        (r"p=5,q=2;p=7,q=2", r"p = 5, q = 2 \quad \text{and} \quad p = 7, q = 2"),
        ("(p,q)=(7,2),(5,2)", "p=5,q=2;p=7,q=2"),
        ("k=45,n=2", "n=2,k=45"),
        ("x=1,y=2", "(1,2)"),
        ("(x,y)=(1,2)", "x=1,y=2"),
        ("a=-2,b=-2", "-2,-2"),
        ("(-2,-2)", "-2,-2"),
        ("1,1,2", "1,2"),
        (r"x \in \{3,2,1\}", r"\{1,2,3\}"),
        (r"\text{3 and 5}", "3,5"),
        ("x=1,2,3", "3,2,1"),
        ("(f(n),g(n))=(n,1)", "$f(n)=n$, $g(n)=1$"),
    ],
    "units": [
        ("5 cm, 7 cm", r"5\text{ cm}, 7\text{ cm}"),
        (r"5\text{ cm and }7\text{ cm}", "5,7"),
        (r"(5\text{ cm}, 7\text{ cm})", "(5,7)"),
        (r"60 \frac{\text{km}}{\text{h}}", "60"),
        (r"5 \mathrm{~kJ} / \text{mole photons}", "5"),
        ("15,000 kcal m⁻² yr⁻¹", "15000"),
        (r"1.3 × 10⁻²⁷ \mathrm{~kg·m/s}", r"1.3 \times 10^{-27}"),
        (r"6630.65 \text{ Å}", "6630.65"),
        (r"15 \text{ square centimeters}", r"15\mbox{ cm}^2"),
        (r"12^{\text{th}} \text{ grade}", "12"),
        (r"0.003 \text{ arcseconds}", r"0.003^{\prime\prime}"),
        (r"5 \text{ million dollars}", "5000000"),
        (r"3:30 PM", r"3:30 \text{ p.m.}"),
        ("25 °C", "25"),
        ("17.5", "17.5%"),
        ("0.175", r"17.5 \text{ percent}"),
        ("1,000.99", "1000.99"),
    ],
    "names": [
        ("b = m", "m"),
        ("E_2, E_1", "E_{1},E_{2}"),
        (r"n^2-n-1", r"m_{\max }=n^{2}-n-1"),
        ("I^2R", "RI^2"),
        ("y=2x+3", "y-2x-3=0"),
        ("x(t) = 2t+t", "x = 3t"),
        ("1=f(x)", "f(x)=1"),
    ],
    "derivatives": [
        (r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kx - a"),
        (r"\dot{v} = \frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{dM}{dt} = \frac{L_{\odot} M^{6}}{7}", r"\frac{dM}{dt}=\frac{L_{\odot}}{7} M^{6}"),
        (r"\frac{\dot{x}_0}{\omega}\sin\omega t", r"\sin(\omega t) \frac{\dot{x}_{0}}{\omega}"),
    ],
    "constants": [
        (r"\frac{C}{x^2}-\frac{\cos 2x}{2x^2}", r"cx^{-2} - \frac{\cos(2x)}{2x^2}"),
        (r"x = \frac{1}{3}e^{t} + Ce^{-2t}", r"x = \frac{e^{t}}{3} + ce^{-2t}"),
        ("c_1 e^t + c_2 e^{-t} + t", "C_{1} e^{t} + C_{2} e^{-t} + t"),
    ],
    "formulas": [
        (r"\frac{1}{a} \sinh(at)", r"\frac{e^{at}-e^{-at}}{2a}"),
        (r"2\sin x\cos x", r"\sin 2x"),
        (r"\log_2 8", "3"),
        (r"\sqrt{x^2}", "|x|"),
    ],
    "ranges": [
        (r"2 \leq x < 5", "[2,5)"),
        (r"-2 \le x \le 7", r"x \in [-2,7]"),
    ],
    "conditions": [
        (r"A = \frac{1}{4 - w^2}, \quad \text{for } w^2 \neq 4", r"\frac{1}{4-w^{2}}"),
        (r"f(x)=2x \text{ for all } x \in \mathbb{R}", "f(x)=2x"),
    ],
    "bases": [("10110_2", "10110_{(2)}"), ("10110", "10110_{(2)}")],
    "choices": [("D", "(D) Alina"), (r"\text{(D)}", "(D) Alina")],
    "ratios": [(r"\sqrt{5} : 2 \cdot \sqrt{2} : 3", r"\sqrt{5} : 2\sqrt{2} : 3")],
    "delimiters": [(r"\(69$,$84\)", "$69$,$84$"), (r"\[x+1\]", "1+x")],
    "escaped twice": [(r"\\frac{1}{2}", r"\frac12"), (r"-2 \\le x \\le 7", r"x \in [-2,7]")],
}

NEAR_MISSES = {
    "complex": [
        ("3-4i", "3+4i"), ("4+3i", "3+4i"), ("3+4x", "3+4i"), ("3+4I", "3+4i"), ("3+4j", "3+4i"),
        ("I", "i"), ("x", "i"), ("-1", "i"), ("-1", "I^2"), ("2Pi", "P(1+i)^2"), ("-x", "i^2 x"),
        ("(1+i)^2", "2i+1"), (r"\pm i", "i"),
    ],
    "plus-minus": [
        (r"2+\sqrt{3}", r"2\pm\sqrt{3}"), (r"2\pm\sqrt{3}", r"2+\sqrt{3}"),
        (r"2\pm\sqrt{2}", r"2\pm\sqrt{3}"), (r"2+\sqrt{3},2+\sqrt{3}", r"2\pm\sqrt{3}"),
        ("5,-5,0", r"\pm 5"), ("5,5", r"\pm 5"), (r"\pm1\pm2", "3,-3"), (r"\pm1\pm2", "3,1,-1,-3"),
        ("(1,1),(-1,-1)", r"(\pm 1,\mp 1)"),
    ],
    "lists": [
        ("p=5,p=7,q=2", r"p = 5, q = 2 \text{ and } p = 7, q = 2"),
        ("p=5,q=2;p=7,q=3", "p=5,q=2;p=7,q=2"), ("p=5,q=2", "p=5,q=2;p=7,q=2"),
        ("(p,q)=(5,2),(2,7)", "p=5,q=2;p=7,q=2"), ("p=5,q=2,p=7,q=2", "p=5,q=7,p=2,q=2"),
        ("x=1,y=2", "y=1,x=2"), ("x=2,y=1", "(1,2)"), ("y=1,x=2", "1,2"), ("(2,1)", "1,2"),
        ("-2", "-2,-2"), ("2,2", "1,2"), ("1,2", "1,2,2"), (r"\{1,2\}", "(1,2)"), ("(1,2]", "1,2"),
        ("y=1,2,3", "x=1,2,3"), ("1,000", "1,0"), ("n=45,k=2", "k=45,n=2"),
    ],
    "units": [
        ("5 cm", r"5\text{ cm}, 7\text{ cm}"), (r"5\text{ cm}, 7\text{ cm}", "5"),
        ("5 cm, 8 cm", r"5\text{ cm}, 7\text{ cm}"), (r"5\text{ cm} \cdot 7\text{ cm}", "5"),
        (r"5\text{cm}\frac{7}{8}", "5"), (r"5\text{ cm}7\text{ cm}", "5"),
        ("2t", "2"), ("2 t", "2"), ("2m", "2"), ("2ab", "2"), ("2c", "2"),
        (r"5\text{ km}", r"5\text{ m}"), (r"5\text{ cm}", r"5\text{ cm}^2"),
        (r"5.4 \text{ dollars}", r"5.4 \text{ cents}"), ("3:30 AM", r"3:30 \text{ p.m.}"),
        (r"5\text{ million}", "5"), (r"5\text{ dozen}", "5"), (r"5\text{ squared}", "5"),
        (r"5 \text{ or more}", "5"), (r"5 \text{ if n even, } 6 \text{ if n odd}", "5"),
        (r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}+4"), (r"2\mathrm{e}", "2"), (r"3\text{i}", "3"),
        ("17.5%", "18"), ("175", "17.5%"), ("1.75", "17.5%"), ("2^{nd}+1", "2"),
        ("1,000.98", "1000.99"),
    ],
    "names": [
        ("E_1", "E_2"), ("E_1", "E_1, E_2"), (r"m_{\min} = n^2", r"m_{\max} = n^2"),
        (r"L_{\odot}", "L"), ("f(N)=n^2", "f(n)=n^2"), ("11a+c", "7=11a+c"), ("0", "a+3z=0"),
        ("g(x)=3x", "f(x)=3x"),
    ],
    "derivatives": [
        (r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kt - a"),
        (r"v\frac{dv}{dt} = v\frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{dv}{dt} = \frac{f + bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{d^2v}{dt^2} = \frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"),
        ("mv = f - bv", r"m \frac{d v}{d t}+b v=f"),
        (r"\frac{d^{2} v}{d t^{7}}=k", r"\frac{d^{2} v}{d t^{2}}=k"),
    ],
    "constants": [
        ("mC^2", "mc^2"), ("C", "c"), ("2C", "2c"), ("R+C", "R+c"), ("Cx^2", "cx^2"),
        ("x+C+c", "x+2c"), (r"\frac{C}{x}+x+c", r"\frac{c}{x}+x+C"), ("-x+C", "x+c"),
    ],
    "formulas": [
        ("|x|", "x"), (r"\sqrt{x^2}", "x"), (r"\ln x^2", r"3 \ln x"), ("x+10^{-20}", "x"),
        (r"\frac{1}{a} \cosh(at)", r"\frac{e^{at}-e^{-at}}{2a}"), ("y=3x", "y=2x"),
    ],
    "ranges": [
        (r"2 \leq x \leq 5", "[2,5)"), (r"-2 \le y \le 7", r"x \in [-2,7]"), ("y>2", "x>2"),
    ],
    "conditions": [
        (r"x = 5, \text{ for } x \neq 3", "3"), (r"4 \text{ for } x = 2", "4"),
        (r"5 \text{ is wrong, } 6", "6"),
    ],
    "bases": [
        ("10110_{(7)}", "10110_{(2)}"), ("5_{a}", "5"), ("12_{5}+x", "12+x"),
    ],
    "choices": [("C", "(D) Alina"), ("D", "(D) or (E)")],
    "ratios": [
        ("3:2", "2:3"), ("(2,3)", "2:3"), ("2,3", "2:3"), ("2:3", "(2,3)"), ("8:35", "8:34"),
        ("23", "2:3"), ("6", "2:3"),
    ],
    "dots": [
        (r"1,2,\ldots,10", "1,2,10"), (r"1+2+\ldots+10", "13"), (r"0.333\ldots", "0.333"),
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
