"""Two single values compared by math-verify, without what it overlooks. Runs in a grading worker.

sympy and math-verify are imported when they are first needed, which `worker.warm_up` sees to.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from sg_rlhf.tasks.math.answers import numeric
from sg_rlhf.tasks.math.answers.reason import Reason
from sg_rlhf.tasks.math.answers.symbols import protect, protected_name

# Variables that a constant of integration stands beside.
_VARIABLES = frozenset("xytz") | {"theta"}
_CONSTANT = re.compile(r"[cC](?:_\{?[0-9]\}?)?")


def equivalent(gold: str, answer: str) -> Reason:
    """`CORRECT`, `WRONG`, `UNPARSEABLE` or `AMBIGUOUS` (the answer) or `UNREADABLE_GOLD`."""
    from math_verify.grader import should_treat_as_complex  # type: ignore[import-untyped]

    gold, answer = protect(gold), protect(answer)
    # One and the same for both, or a variable of the one is not the same as that of the other.
    real = not (should_treat_as_complex(gold) or should_treat_as_complex(answer))
    predicted = _parse(answer, real)
    if predicted is None:
        return Reason.UNPARSEABLE
    wanted = _parse(gold, real)
    if wanted is not None:
        wanted, predicted = _with_imaginary_unit(wanted, predicted)
    if inconsistent_chain(predicted):
        return Reason.AMBIGUOUS
    if wanted is None:
        return Reason.UNREADABLE_GOLD
    return Reason.CORRECT if _same(wanted, predicted) else Reason.WRONG


def _same(gold: Any, predicted: Any) -> bool:
    if (
        len(chain_members(gold)) == 1
        and len(chain_members(predicted)) > 1
        and chain_members(predicted)[0] == 0
    ):
        return False
    if _number_against_list(gold, predicted):
        return False
    if relation_is_interval(gold, predicted):
        return True
    pair = value_pair(gold, predicted)
    if pair is None:
        if _same_equation(gold, predicted):
            return True
    elif numeric.numerically_different(*pair):
        return equal_up_to_constant(*pair)
    elif numeric.numerically_equal(*pair):
        return True
    return _equal(gold, predicted) and not numeric.exceeds_tolerance(
        chain_members(gold)[-1], chain_members(predicted)[-1]
    )


@lru_cache(maxsize=2048)
def _parse(text: str, real: bool) -> Any:
    """The sympy object that math-verify makes of a whole text, or None.

    `math_verify.parse` looks for anything that it can read inside the text, so that it finds 5 in
    "surely 5, not 6"; and it hands number-like text to sympy's `parse_expr`, which evaluates
    Python. The steps below are the ones that it takes for the content of a box, but for its units:
    it takes the `t` of 2t for one, and everything behind a first `\\text`.
    """
    from latex2sympy2_extended import (  # type: ignore[import-untyped]
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped]

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        parsed = latex2sympy(
            normalize_latex(text, config),
            is_real=real,
            normalization_config=None,
            # By default R and r are one symbol.
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # A variable E prints as the number e does, and math-verify compares what is printed.
        energies = [s for s in getattr(parsed, "free_symbols", ()) if s.name == "E"]
        return parsed.xreplace({s: s.func("E_", **s.assumptions0) for s in energies})
    except MemoryError:
        raise
    except Exception:
        # The parser raises bare Exception for text that it cannot read, and sympy anything.
        return None


def _equal(gold: Any, predicted: Any) -> bool:
    from math_verify import verify  # type: ignore[import-untyped]

    try:
        return bool(verify(gold, predicted, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        # Objects that sympy cannot compare, such as nan, are not equal.
        return False


def _with_imaginary_unit(gold: Any, predicted: Any) -> tuple[Any, Any]:
    """Both with the number i for the letter, where the gold says that it is the number.

    It does where it has no other letter, and where e has i in its exponent.
    """
    from sympy import Eq, I, Integral, Product, Sum, exp  # type: ignore[import-untyped]

    def letters(value: Any) -> set[str]:
        return {symbol.name for symbol in getattr(chain_members(value)[-1], "free_symbols", ())}

    if "i" not in letters(gold) | letters(predicted):
        return gold, predicted
    turning = any(
        symbol.name == "i" for power in gold.atoms(exp) for symbol in power.args[0].free_symbols
    )
    if not (turning or letters(gold) | letters(predicted) == {"i"}):
        return gold, predicted
    if gold.has(Sum, Product, Integral) or predicted.has(Sum, Product, Integral):
        return gold, predicted

    def replaced(value: Any) -> Any:
        if isinstance(value, Eq):  # z = 3 + 4i is not false for being no real number
            return Eq(replaced(value.lhs), replaced(value.rhs), evaluate=False)
        if len(chain_members(value)) > 1:
            return type(value)(*map(replaced, value._unsorted_args))
        return value.xreplace({symbol: I for symbol in value.free_symbols if symbol.name == "i"})

    return replaced(gold), replaced(predicted)


def chain_members(expression: Any) -> list[Any]:
    """a, b, c of a = b = c; an expression alone is its only side."""
    from sympy import And, Eq

    if isinstance(expression, Eq):
        return [expression.lhs, expression.rhs]
    if isinstance(expression, And):
        links = getattr(expression, "_unsorted_args", expression.args)
        if links and all(isinstance(link, Eq) for link in links):
            return [links[0].lhs, *(link.rhs for link in links)]
    return [expression]


def inconsistent_chain(expression: Any) -> bool:
    """Whether an answer a = b = c names several answers: 4 = 5, or y = 3x = 2x.

    math-verify takes the last side. The first side may be a name, as in y = 2x and f(x) = 2x, and
    a side with other variables than the last is a formula: A = pi r^2 = 9 pi.
    """
    from sympy import FiniteSet, Tuple
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

    if isinstance(expression, FiniteSet | Tuple):
        return any(inconsistent_chain(element) for element in expression.args)
    sides = chain_members(expression)
    # 0 = x + 1 is an equation to solve, and an answer only to a gold that is one, too.
    if len(sides) == 1 or sides[0] == 0:
        return False
    if len(sides) == 2 and sides[1].is_Symbol:
        return False  # 5 = x is x = 5
    first, *middle, last = sides
    symbols = getattr(last, "free_symbols", None)
    compared = [side for side in middle if getattr(side, "free_symbols", None) == symbols]
    if getattr(first, "free_symbols", None) == set() and not first.has(AppliedUndef):
        compared.append(first)
    return any(not _equal(last, side) for side in compared)


def _number_against_list(gold: Any, predicted: Any) -> bool:
    """Whether one is a list of several and the other a single value.

    math-verify tries a list's digits without its commas, so that 32, 349 is 32349.
    """
    from sympy import Expr, FiniteSet, Tuple

    def several(value: Any) -> bool:
        return isinstance(value, FiniteSet | Tuple) and len(value.args) > 1

    return any(
        several(a) and isinstance(b, Expr) for a, b in ((gold, predicted), (predicted, gold))
    )


def value_pair(gold: Any, predicted: Any) -> tuple[Any, Any] | None:
    """What is compared where two formulas are compared by value; None where they are not.

    They are not for two equations, unless both say what one name is, and for sets, percentages and
    names.
    """
    from sympy import Expr, Symbol, UnevaluatedExpr

    sides = [chain_members(side) for side in (gold, predicted)]
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
        if not isinstance(side, Expr) or isinstance(side, Symbol) or side.has(UnevaluatedExpr):
            return None
    return pair


def _name(side: Any) -> str | None:
    """x of x and of x(t)."""
    from sympy import Symbol
    from sympy.core.function import AppliedUndef

    if isinstance(side, AppliedUndef):
        return str(side.func.__name__)
    return str(side.name) if isinstance(side, Symbol) else None


def _same_name(a: Any, b: Any) -> bool:
    """x and x, x and x(t), but not x(t) and x(T)."""
    return _name(a) is not None and _name(a) == _name(b) and (a == b or a.is_Symbol or b.is_Symbol)


def equal_up_to_constant(gold: Any, predicted: Any) -> bool:
    """Whether the answer writes the gold's constants of integration as C for c, or c for C.

    Such a constant c stands in a sum u + c v, in which u is not 0 and a variable occurs.
    """
    constants = {s for s in gold.free_symbols if _CONSTANT.fullmatch(s.name)}
    renamed = {s: s.func(s.name.swapcase(), **s.assumptions0) for s in constants}
    names = {s.name for s in predicted.free_symbols}
    if not constants or any(s.name in names or r.name not in names for s, r in renamed.items()):
        return False
    rest = gold.xreplace({s: s * 0 for s in constants})
    try:
        if numeric.numerically_equal(rest, rest * 0):
            return False
        for constant in constants:
            factor = gold.diff(constant)
            if factor.free_symbols & constants:
                return False
            if not {s.name for s in factor.free_symbols | rest.free_symbols} & _VARIABLES:
                return False
    except MemoryError:
        raise
    except Exception:
        return False
    return numeric.numerically_equal(gold.xreplace(renamed), predicted)


def _same_equation(gold: Any, predicted: Any) -> bool:
    """Whether a = b and c = d say the same: a - b is a number, not 0, times c - d.

    Of a differential equation, which has no solutions at a parameter's zeros to lose, it may also
    be a product of powers of parameters.
    """
    from sympy import Eq, Expr, cancel, nsimplify

    if not (isinstance(gold, Eq) and isinstance(predicted, Eq)):
        return False
    # Not for x = {1, 2}, nor for x = [-2, 7], as which the parser has a variable's range.
    if not all(isinstance(side, Expr) for side in (*gold.args, *predicted.args)):
        return False
    try:
        wanted, given = (nsimplify(e.lhs - e.rhs, rational=True) for e in (gold, predicted))
        if not wanted.free_symbols or wanted.free_symbols != given.free_symbols:
            return False
        parameters = _parameters(wanted)
        wanted, given = _without_functions(wanted, given)
        if not numeric.may_be_multiple(wanted, given, parameters):
            return False
        ratio = cancel(wanted / given)
        if ratio.is_number:
            return bool(ratio.is_finite and ratio.is_nonzero)
        factors = ratio.as_powers_dict()
        return all(base in parameters or base.is_number for base in factors)
    except MemoryError:
        raise
    except Exception:
        return False  # what sympy cannot divide it does not prove


def _without_functions(a: Any, b: Any) -> tuple[Any, Any]:
    """Letters in the place of f(t) and the like, whose values at a point are not known."""
    from sympy import Dummy
    from sympy.core.function import AppliedUndef

    functions = a.atoms(AppliedUndef) | b.atoms(AppliedUndef)
    letters = {f: Dummy(f"F{index}") for index, f in enumerate(sorted(functions, key=str))}
    return a.xreplace(letters), b.xreplace(letters)


def _parameters(equation: Any) -> set[Any]:
    """The letters of a differential equation that are neither its unknowns nor their variable."""
    from sympy.core.function import AppliedUndef

    derivatives = {
        s: protected_name(s.name) for s in equation.free_symbols if protected_name(s.name)
    }
    used = {name for pair in derivatives.values() if pair for name in pair}
    bound = {s for f in equation.atoms(AppliedUndef) for s in f.free_symbols}
    if not derivatives:
        return set()
    plain = {
        s: s.name.replace("\\", "").replace("_", "").strip("{}") for s in equation.free_symbols
    }
    return {s for s in plain if s not in derivatives and s not in bound and plain[s] not in used}


def relation_is_interval(gold: Any, predicted: Any) -> bool:
    """Whether relations in one variable, as 2 <= x < 5, say the range that the gold is."""
    from sympy import And, Set
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    links = predicted.args if isinstance(predicted, And) else (predicted,)
    if not all(isinstance(link, Relational) for link in links):
        return False
    *names, gold = chain_members(gold)
    if not isinstance(gold, Set) or any(predicted.free_symbols != {name} for name in names):
        return False
    if len(predicted.free_symbols) != 1:
        return False
    try:
        return bool(And(*links).as_set() == gold)
    except MemoryError:
        raise
    except Exception:
        return False  # of a relation that sympy cannot solve
