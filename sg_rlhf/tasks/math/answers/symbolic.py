"""Two single values compared by math-verify, without what it overlooks. Imports sympy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import (  # type: ignore[import-untyped]
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped]
from math_verify import verify  # type: ignore[import-untyped]
from math_verify.grader import should_treat_as_complex  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from sympy.core.relational import Relational  # type: ignore[import-untyped]

from sg_rlhf.tasks.math.answers import numeric
from sg_rlhf.tasks.math.answers.rewrites import SYMBOLS
from sg_rlhf.tasks.math.answers.rules import Reason, Rule

# Variables that a constant of integration stands beside.
_VARIABLES = frozenset("xytz") | {"theta"}
_CONSTANT = re.compile(r"[cC](?:_\{?[0-9]\}?)?")
_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
# By default R and r are one symbol.
_CASE_SENSITIVE = ConversionConfig(lowercase_symbols=False)


def equivalent(reference: str, answer: str) -> Reason:
    """`CORRECT`, `WRONG`, `UNPARSEABLE` or `AMBIGUOUS` (the answer) or `UNREADABLE_GOLD`."""
    reference, answer = _with_symbols(reference), _with_symbols(answer)
    # Parse both as real or both as complex: Symbol("x", real=True) != Symbol("x").
    real = not (should_treat_as_complex(reference) or should_treat_as_complex(answer))
    given, wanted = _parse(answer, real), _parse(reference, real)
    if given is None:
        return Reason.UNPARSEABLE
    if wanted is not None:
        wanted, given = _with_imaginary_unit(wanted, given)
    for rule in ALONE:
        if rule.apply(given):
            return Reason.AMBIGUOUS
    if wanted is None:
        return Reason.UNREADABLE_GOLD
    for rule in TOGETHER:
        verdict = rule.apply(wanted, given)
        if verdict is not None:
            return Reason.CORRECT if verdict else Reason.WRONG
    return Reason.CORRECT if _equal(wanted, given) else Reason.WRONG


def _with_symbols(text: str) -> str:
    r"""The same with a plain symbol for each derivative and for each subscript that is not read.

    >>> _with_symbols(r"\frac{dx}{dt} = k x(t) + E_1 - m_{\max}")
    'D_{1QxQt} = k x  + Z_{E1} - Z_{mmax}'
    """
    for rule in SYMBOLS:
        text = rule.apply(text)
    return text.strip()


def _unless_sympy_fails(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule's result, or None where sympy raises; what it cannot compute it does not prove."""

    @wraps(rule)
    def guarded(*values: Any) -> Any:
        try:
            return rule(*values)
        except MemoryError:
            raise
        except Exception:
            return None

    return guarded


@lru_cache(maxsize=2048)
@_unless_sympy_fails
def _parse(text: str, real: bool) -> Any:
    """The sympy object that math-verify makes of a whole text, or None.

    Its own `parse` finds 5 in "surely 5, not 6", and hands number-like text to sympy's
    `parse_expr`, which evaluates Python. It takes the `t` of 2t for a unit. These steps do not.
    """
    parsed = latex2sympy(
        normalize_latex(text, _LATEX),
        is_real=real,
        normalization_config=None,
        conversion_config=_CASE_SENSITIVE,
    )
    # A variable E prints as the number e does, and math-verify compares what is printed.
    energies = [s for s in getattr(parsed, "free_symbols", ()) if s.name == "E"]
    return parsed.xreplace({s: s.func("E_", **s.assumptions0) for s in energies})


@_unless_sympy_fails
def _equal(reference: Any, given: Any) -> bool:
    return bool(verify(reference, given, timeout_seconds=None, raise_on_error=True))


def _with_imaginary_unit(reference: Any, given: Any) -> tuple[Any, Any]:
    """Both with the number i for the letter, where the reference has no other letter, or e^i."""

    def letters(value: Any) -> set[str]:
        return {symbol.name for symbol in getattr(chain_members(value)[-1], "free_symbols", ())}

    both = letters(reference) | letters(given)
    if "i" not in both or any(
        v.has(sympy.Sum, sympy.Product, sympy.Integral) for v in (reference, given)
    ):
        return reference, given
    in_exponent = any(
        s.name == "i" for power in reference.atoms(sympy.exp) for s in power.args[0].free_symbols
    )
    if not in_exponent and both != {"i"}:
        return reference, given

    def replaced(value: Any) -> Any:
        if isinstance(value, sympy.Eq):  # z = 3 + 4i is not false for being no real number
            return sympy.Eq(replaced(value.lhs), replaced(value.rhs), evaluate=False)
        if len(chain_members(value)) > 1:
            return type(value)(*map(replaced, value._unsorted_args))
        return value.xreplace(
            {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
        )

    return replaced(reference), replaced(given)


def chain_members(expression: Any) -> list[Any]:
    """a, b, c of a = b = c; an expression alone is its only member."""
    if isinstance(expression, sympy.Eq):
        return [expression.lhs, expression.rhs]
    if isinstance(expression, sympy.And):
        links = getattr(expression, "_unsorted_args", expression.args)
        if links and all(isinstance(link, sympy.Eq) for link in links):
            return [links[0].lhs, *(link.rhs for link in links)]
    return [expression]


def inconsistent_chain(expression: Any) -> bool:
    """Whether an answer a = b = c names several values: 4 = 5, or y = 3x = 2x.

    The first side may be a name, and a side with other variables than the last is a formula.
    """
    if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
        return any(inconsistent_chain(element) for element in expression.args)
    first, *middle = chain_members(expression)
    # 0 = x + 1 is an equation to solve, and an answer only to a reference that is one, too.
    if not middle or first == 0:
        return False
    last = middle.pop()
    if not middle and last.is_Symbol:
        return False  # 5 = x is x = 5
    symbols = getattr(last, "free_symbols", None)
    compared = [side for side in middle if getattr(side, "free_symbols", None) == symbols]
    if getattr(first, "free_symbols", None) == set() and not first.has(AppliedUndef):
        compared.append(first)
    return any(not _equal(last, side) for side in compared)


def value_pair(reference: Any, given: Any) -> tuple[Any, Any] | None:
    """The two formulas to compare by value; None for sets, percentages and names."""
    sides = [chain_members(side) for side in (reference, given)]
    if len(sides[0]) > 1:
        # 11 is no answer to 4a + c = 11.
        if _name(sides[0][0]) is None:
            return None
        if len(sides[1]) > 1 and not _same_name(sides[0][0], sides[1][0]):
            return None
        names = [_name(side[0]) for side in sides if len(side) > 1]
        if any(_name(part) in names for side in sides for part in side[-1].atoms()):
            return None
    pair = (sides[0][-1], sides[1][-1])
    for side in pair:
        if (
            not isinstance(side, sympy.Expr)
            or isinstance(side, sympy.Symbol)
            or side.has(sympy.UnevaluatedExpr)
        ):
            return None
    return pair


def _name(side: Any) -> str | None:
    """x of x and of x(t)."""
    if isinstance(side, AppliedUndef):
        return str(side.func.__name__)
    return str(side.name) if isinstance(side, sympy.Symbol) else None


def _same_name(a: Any, b: Any) -> bool:
    """x and x, x and x(t), but not x(t) and x(T)."""
    return _name(a) is not None and _name(a) == _name(b) and (a == b or a.is_Symbol or b.is_Symbol)


def _zero_first(reference: Any, given: Any) -> bool | None:
    members = chain_members(given)
    alone = len(chain_members(reference)) == 1
    return False if alone and len(members) > 1 and members[0] == 0 else None


@_unless_sympy_fails
def relation_is_interval(reference: Any, given: Any) -> bool | None:
    """True where relations in one variable, as 2 <= x < 5, say the reference's interval."""
    links = given.args if isinstance(given, sympy.And) else (given,)
    if not all(isinstance(link, Relational) for link in links):
        return None
    *names, interval = chain_members(reference)
    if not isinstance(interval, sympy.Set) or len(given.free_symbols) != 1:
        return None
    named = all(given.free_symbols == {name} for name in names)
    return True if named and sympy.And(*links).as_set() == interval else None


@_unless_sympy_fails
def equal_up_to_constant(reference: Any, given: Any) -> bool | None:
    """True where the answer writes the reference's constants of integration c as C, or C as c."""
    pair = value_pair(reference, given)
    if pair is None:
        return None
    wanted, found = pair
    constants = {s for s in wanted.free_symbols if _CONSTANT.fullmatch(s.name)}
    renamed = {s: s.func(s.name.swapcase(), **s.assumptions0) for s in constants}
    names = {s.name for s in found.free_symbols}
    if not constants or any(s.name in names or r.name not in names for s, r in renamed.items()):
        return None
    rest = wanted.xreplace({s: s * 0 for s in constants})
    if numeric.numerically_equal(rest, rest * 0):
        return None
    for constant in constants:
        factor = wanted.diff(constant)
        if factor.free_symbols & constants:
            return None
        if not {s.name for s in factor.free_symbols | rest.free_symbols} & _VARIABLES:
            return None
    return numeric.numerically_equal(wanted.xreplace(renamed), found) or None


@_unless_sympy_fails
def same_equation(reference: Any, given: Any) -> bool | None:
    """True where a = b and c = d say the same: a - b is a number, not 0, times c - d."""
    # Not for x = {1, 2}, nor for x = [-2, 7], as which the parser has a variable's range.
    if not all(
        isinstance(e, sympy.Eq) and all(isinstance(s, sympy.Expr) for s in e.args)
        for e in (reference, given)
    ):
        return None
    if value_pair(reference, given) is not None:
        return None
    wanted, found = (sympy.nsimplify(e.lhs - e.rhs, rational=True) for e in (reference, given))
    if not wanted.free_symbols or wanted.free_symbols != found.free_symbols:
        return None
    if not numeric.may_be_multiple(wanted, found):
        return None
    ratio = sympy.cancel(wanted / found)
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero) or None


def _different_values(reference: Any, given: Any) -> bool | None:
    pair = value_pair(reference, given)
    return False if pair is not None and numeric.numerically_different(*pair) else None


def _same_values(reference: Any, given: Any) -> bool | None:
    pair = value_pair(reference, given)
    return True if pair is not None and numeric.numerically_equal(*pair) else None


def _beyond_tolerance(reference: Any, given: Any) -> bool | None:
    last = (chain_members(side)[-1] for side in (reference, given))
    return False if numeric.exceeds_tolerance(*last) else None


# fmt: off
#: Parsed answer -> whether it contradicts itself.
ALONE: tuple[Rule, ...] = (
    Rule("inconsistent chain", "Reject 4 = 5 and y = 3x = 2x.",
        lambda a: inconsistent_chain(a) or None, right=((r"A=\pi r^2=9\pi", r"9\pi"),
        (r"x=2\cdot 3=6", "6")), near_misses=(("4=5", "5"), ("x=3=4=5", "5"), ("y=3x=2x", "y=2x"),
        ("7654321=3,-3", "3,-3"))),
)
#: (parsed reference, parsed answer) -> verdict, or None; math-verify decides at the end.
TOGETHER: tuple[Rule, ...] = (
    Rule("equation for a value", "Reject 0 = 3x + 1 for 3x + 1.", _zero_first,
        right=(("0=1+x", "0=x+1"),), near_misses=(("0=3x+1", "3x+1"),)),
    Rule("relation for an interval", "Accept 2 <= x < 5 for [2, 5).", relation_is_interval,
        right=((r"x \geq 2", r"[2,\infty)"), (r"2 \leq x < 5", "[2,5)")),
        near_misses=(("x > 2", r"[2,\infty)"), (r"-2 \le y \le 7", r"x \in [-2,7]"))),
    Rule("constant of integration", "Accept C for c as a constant of integration.",
        equal_up_to_constant,
        right=((r"\frac{C}{x^2}-\frac{\cos 2x}{2x^2}", r"cx^{-2} - \frac{\cos(2x)}{2x^2}"),
        ("c_1 e^t + c_2 e^{-t} + t", "C_{1} e^{t} + C_{2} e^{-t} + t")), near_misses=(("C", "c"),
        ("R+C", "R+c"), ("x+C+c", "x+2c"), ("-x+C", "x+c"))),
    Rule("equation rearranged", "Accept an equation that is a multiple of the reference's.",
        same_equation, right=(("2x+2y=10", "x+y=5"),), near_misses=(("x+y-6=0", "x+y=5"),
        ("0=0", "x+y=5"), (r"v\frac{dv}{dt} = v\frac{f - bv}{m}", r"m \frac{d v}{d t}+b v=f"))),
    Rule("different values", "Reject a formula whose value at a point differs.", _different_values,
        right=((r"2\sin x\cos x", r"\sin 2x"),), near_misses=(("2c", "2t"), ("y=3x", "y=2x"),
        # math-verify takes 20 s.
        (r"\frac{\sin x+\tan^3(x+y)}{\tan(x^2+1)+\cos(x+y+z)}",
         r"\frac{\sin^5(x+z)+\cos x}{\sin(x-y)+\tan(x+z)\sqrt{x+1}}"))),
    Rule("equal values", "Accept a formula with equal values to 30 digits at three points or more.",
        _same_values, right=((r"\frac{1}{a} \sinh(at)", r"\frac{e^{at}-e^{-at}}{2a}"),),
        near_misses=(("|x|", "x"), (r"\ln x^2", r"3 \ln x"), ("x+10^{-20}", "x"))),
    Rule("rounding", "Reject numbers that differ by more than 1 in 10,000.", _beyond_tolerance,
        right=(("0.333333", r"\frac{1}{3}"),), near_misses=(("0.3333", r"\frac13"),
        ("0.0", r"1.6 \times 10^{-19}"), ("3^{-40}", r"1.6 \times 10^{-19}"))),
)
# fmt: on
