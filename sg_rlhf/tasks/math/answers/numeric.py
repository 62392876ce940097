"""Two formulas compared by their values at points; sympy's own proofs can take minutes."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.core.numbers import NumberSymbol  # type: ignore[import-untyped]
from sympy.functions.elementary import (  # type: ignore[import-untyped]
    hyperbolic,
    trigonometric,
)

# Largest relative difference of two numbers that may be called equal. math-verify rounds to six
# decimals, which makes 0.0 equal to 1.6e-19.
RELATIVE_TOLERANCE = 1e-4
DIGITS = 40
_AGREEMENT = 30
# Values of the first variable; the next ones follow in steps. Of both signs, or |x| would be x.
PROBE_POINTS = ("61803/100000", "-141421/100000", "173205/100000", "-27183/100000", "331662/100000")
_STEP = "41421/100000"


def numerically_different(a: Any, b: Any) -> bool:
    """Whether two expressions have clearly different values at a point: most wrong answers do."""
    point = _point(a, b, 0, positive=True)
    try:
        x, y = (complex(side.subs(point).evalf(15)) for side in (a, b))
    except MemoryError:
        raise
    except Exception:
        # No value there, as for an unknown function.
        return False
    return abs(x - y) > max(1e-3 * max(abs(x), abs(y)), 1e-3)


def numerically_equal(a: Any, b: Any) -> bool:
    """Whether two elementary formulas without decimals have the same values to 30 digits.

    At five points, of which three must have a value; False says nothing.
    """
    if not (_elementary(a) and _elementary(b)):
        return False
    found = 0
    for index in range(len(PROBE_POINTS)):
        point = _point(a, b, index)
        try:
            x, y = (side.evalf(DIGITS, subs=point) for side in (a, b))
            if not (x.is_number and x.is_finite and y.is_number and y.is_finite):
                continue
            if abs(x - y) > (1 + abs(x)) * 10**-_AGREEMENT:
                return False
        except MemoryError:
            raise
        except Exception:
            continue
        found += 1
        if not point:
            return True
    return found >= 3


def may_be_multiple(a: Any, b: Any) -> bool:
    """Whether a / b may be the same at three points: where it is not, a is no multiple of b."""
    ratios = []
    for index in range(3):
        point = _point(a, b, index)
        try:
            x, y = (complex(side.subs(point).evalf(15)) for side in (a, b))
            ratios.append(x / y)
        except MemoryError:
            raise
        except Exception:
            return True  # not known
    return all(abs(ratio - ratios[0]) <= 1e-6 * abs(ratios[0]) for ratio in ratios)


def exceeds_tolerance(gold: Any, predicted: Any) -> bool:
    """Whether numbers (or parts of matrices, intervals) differ by more than rounding explains."""
    if isinstance(gold, sympy.MatrixBase) and isinstance(predicted, sympy.MatrixBase):
        return any(map(exceeds_tolerance, gold.flat(), predicted.flat()))
    if isinstance(gold, sympy.Interval) and isinstance(predicted, sympy.Interval):
        ends = ((gold.start, predicted.start), (gold.end, predicted.end))
        return any(exceeds_tolerance(a, b) for a, b in ends)
    if not (isinstance(gold, sympy.Expr) and isinstance(predicted, sympy.Expr)):
        return False
    # 52% equals 52 and 0.52: math-verify's rule, kept.
    if gold.has(sympy.UnevaluatedExpr) or predicted.has(sympy.UnevaluatedExpr):
        return False
    if not (gold.is_number and predicted.is_number):
        return False
    try:
        x, y = (complex(side.doit().evalf(20)) for side in (gold, predicted))
    except (TypeError, ValueError, OverflowError):
        # Too large for a float, or infinite: rounding to six decimals is not what made them equal.
        return False
    if x == 0:
        return abs(y) > 1e-12
    return abs(x - y) > RELATIVE_TOLERANCE * max(abs(x), abs(y))


def _point(a: Any, b: Any, index: int, positive: bool = False) -> dict[Any, Any]:
    """A number for each variable; unrelated ones, so that unequal formulas differ."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    start, step = sympy.Rational(PROBE_POINTS[index]), sympy.Rational(_STEP)
    signs = [1 if positive or index % 2 == 0 or n % 2 else -1 for n in range(len(symbols))]
    return {
        symbol: (abs(start) if positive or index == 0 else start) + sign * step * n
        for n, (symbol, sign) in enumerate(zip(symbols, signs, strict=True))
    }


def _elementary(expression: Any) -> bool:
    allowed = (
        sympy.Rational, NumberSymbol, type(sympy.I), sympy.Symbol, sympy.exp, sympy.log, sympy.Abs,
        trigonometric.TrigonometricFunction, trigonometric.InverseTrigonometricFunction,
        hyperbolic.HyperbolicFunction, hyperbolic.InverseHyperbolicFunction,
    )  # fmt: skip
    return isinstance(expression, sympy.Expr) and all(
        isinstance(part, allowed) or part.is_Add or part.is_Mul or part.is_Pow
        for part in sympy.preorder_traversal(expression)
    )
