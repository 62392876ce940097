"""Hostile answers: each gets a verdict in time, and nothing that they hold is executed."""

import pytest

from sg_rlhf.tasks.math.grading import Reason, WorkerPool, compare, grade, grade_many

HOSTILE = {
    "tower": r"9^{9^{9^9}}",
    "flat tower": "9^9^9^9",
    "huge exponent": "2^{99999999999}",
    "scientific": "1e999999999",
    "power of ten": r"10^{10^{10}}",
    "huge integer": "9" * 100_000,
    "long integer": "9" * 300,
    "huge factorial": "99999999!",
    "factorial of a factorial": "9!!!!",
    "factorial of a factorial in brackets": "((9!)!)!",
    "huge binomial": r"\binom{99999999}{49999999}",
    "huge product": r"\prod_{k=1}^{99999999} k",
    "unending product": r"\prod_{k=1}^{\infty} \left(1+\frac{\sin(k^k)}{k!}\right)",
    "unending sum": r"\sum_{k=1}^{9999} k^{k!}",
    "integral": r"\int_0^\infty \frac{\sin(x^{x^x})}{\log(1+x!)} dx",
    "limit": r"\lim_{n\to\infty} \frac{(n!)^{n!}}{n^{n^n}}",
    "deep braces": "{" * 10_000 + "5" + "}" * 10_000,
    "deep brackets": "(" * 200 + "5" + ")" * 200,
    "deep roots": r"\sqrt{" * 50 + "5" + "}" * 50,
    "deep fractions": r"\frac{1}{" * 100 + "5" + "}" * 100,
    "long chain": "=".join(["x"] * 200),
    "long list": ",".join(["x+1"] * 100),
    "backslashes": "\\" * 1_000_000,
    "braces of text": r"\text{" * 400,
    "many boxes": r"\boxed{" * 150_000,
    "unicode digits": "٣٤٥",
    "zero bytes": "5\0\0",
    "surrogate": "5\ud800",
    "combining marks": "5" + "\u0301" * 1000,
    "quadratic regex bait": "(" + "a" * 450,
    "dots": r"\ldots" * 80,
    "nested text": r"\text{5}" * 50,
    "huge base": "12_{99999999}",
    "matrix": r"\begin{pmatrix}" + "1&" * 200 + r"\end{pmatrix}",
    "determinant": r"\det\begin{pmatrix}a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{pmatrix}^{999}",
    "polynomial": "(a+b+c+d+f+g+h)^{99}",
    "nested exponents of letters": "a^{b^{c^{d^{f^{g}}}}}",
}

CODE = [
    "__import__('os').system('touch {canary}')",
    "__import__('pathlib').Path('{canary}').touch()",
    "open('{canary}','w').write('5')",
    "exec(\"open('{canary}','w')\")",
    "eval(compile('open(\"{canary}\",\"w\")','','exec'))",
    "(lambda: open('{canary}','w'))()",
    r"\text{{open('{canary}','w')}}",
    "().__class__.__base__.__subclasses__()",
    "1+open('{canary}','w').fileno()",
    "5 if open('{canary}','w') else 5",
    r"\operatorname{{open}}('{canary}','w')",
    r"\text{{__import__}}('os').system('touch {canary}')",
    r"\input{{|touch {canary}}}",
    r"\write18{{touch {canary}}}",
    "`touch {canary}`; $(touch {canary})",
]


@pytest.fixture(scope="module")
def strict_pool():
    pool = WorkerPool(workers=1, limit_s=0.6)
    grade(r"\boxed{x+1}", "1+x", pool)  # start it
    yield pool
    pool.close()


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_get_a_verdict(answer, strict_pool):
    result = grade(f"So \\boxed{{{answer}}}.", "5", strict_pool)
    assert not result.correct or result.extracted.strip("{()}") == "5"
    assert result.reason is not Reason.CRASH or "sum" in answer or "lim" in answer


@pytest.mark.parametrize("code", CODE)
def test_code_is_not_executed(code, strict_pool, tmp_path):
    canary = tmp_path / "canary"
    answer = code.format(canary=canary) if "{canary}" in code else code
    result = grade(f"\\boxed{{{answer}}}", "5", strict_pool)
    assert not result.correct
    # Also not by the parser itself, which the gates before it should keep it from.
    assert strict_pool.submit(compare, answer, ("5", answer)).result() is not Reason.CRASH
    assert list(tmp_path.iterdir()) == []


def test_the_canary_can_sing(tmp_path):
    """The first of the code samples does what the test above looks for, once it is evaluated."""
    canary = tmp_path / "canary"
    eval(CODE[0].format(canary=canary))
    assert canary.exists()


def test_hostile_answers_do_not_harm_their_neighbours(strict_pool):
    pairs = []
    for answer in (r"9^{9^9}", r"\sum_{k=1}^{9999} k^{k!}"):
        pairs += [(r"\boxed{1+x}", "x+1"), (f"\\boxed{{{answer}}}", "5"), (r"\boxed{x}", "x+1")]
    reasons = [g.reason for g in grade_many(pairs, strict_pool)]
    assert reasons[::3] == [Reason.CORRECT] * 2
    assert reasons[2::3] == [Reason.WRONG] * 2
    assert set(reasons[1::3]) <= {Reason.TIMEOUT, Reason.CRASH}
