"""What runs in a grading worker: math-verify on one answer, with no time-out of its own.

This module is imported by the trainer too, but sympy and math-verify only in `warm_up`, which the
pool calls in its workers.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
from functools import lru_cache
from typing import Any

from sg_rlhf.tasks.math import confinement
from sg_rlhf.tasks.math.notation import hold_derivatives
from sg_rlhf.tasks.math.outcome import Reason

# Largest relative difference of two numbers that may be called equal. math-verify rounds to six
# decimals, which makes 0.0 equal to 1.6e-19.
RELATIVE_TOLERANCE = 1e-4

# Letters that math-verify strips as units, so that 2t equals 2: wrong where the gold ends in one.
_FINAL_LETTER = re.compile(r"(?<=[0-9}])\s*([cdghlmost])$")


def warm_up() -> None:
    """Make this process ready to grade; a worker's first limit starts only after it.

    Output goes nowhere: the parser prints, and the trainer's terminal is not the place for it.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # pebble's handler waits for the running C call to end, and its kill follows 3 s later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    for module in ("sympy", "latex2sympy2_extended", "math_verify"):
        importlib.import_module(module)
    # Half of the parser's time to a first answer is building its tables.
    for text in (r"\frac{1}{2}", "x=5", "(1,2]", r"\sqrt{3}x^2"):
        check(text, (text,), 60.0)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    # Last: the parser's tables may be written to a cache, and the tests above need no limits.
    confinement.confine()


def check(answer: str, golds: tuple[str, ...], limit_s: float) -> Reason:
    """Compare a tidied answer with tidied golds. `CRASH` stands for running out of memory.

    After `limit_s` seconds of processor time the kernel ends this process with SIGPROF, whatever C
    code it is in and whether or not the trainer still lives. Processor time, because a verdict must
    not depend on what else the machine is doing.
    """
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return _check(answer, golds)
    except MemoryError:
        return Reason.CRASH
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _check(answer: str, golds: tuple[str, ...]) -> Reason:
    answer = hold_derivatives(answer)
    golds = tuple(map(hold_derivatives, golds))
    protect = any(_FINAL_LETTER.search(gold) for gold in golds)
    predicted = _parse(_protect(answer) if protect else answer)
    if predicted is None:
        return Reason.UNPARSEABLE
    if _contradicts_itself(predicted):
        return Reason.AMBIGUOUS
    outcome = Reason.UNREADABLE_GOLD
    for gold in golds:
        wanted = _parse(_protect(gold) if protect else gold)
        if wanted is None:
            continue
        outcome = Reason.WRONG
        if len(_sides(wanted)) == 1 and len(_sides(predicted)) > 1 and _sides(predicted)[0] == 0:
            continue
        if _number_against_list(wanted, predicted):
            continue
        if _same_equation(wanted, predicted) or _same_range(wanted, predicted):
            return Reason.CORRECT
        if _differ_at_a_point(wanted, predicted):
            continue
        if _equal(wanted, predicted) and not _far_apart(wanted, predicted):
            return Reason.CORRECT
    return outcome


def _protect(text: str) -> str:
    return _FINAL_LETTER.sub(r"{\1}", text)


@lru_cache(maxsize=2048)
def _parse(text: str) -> Any:
    """The sympy object that math-verify makes of a whole text, or None.

    `math_verify.parse` looks for anything that it can read inside the text, so that it finds 5 in
    "surely 5, not 6"; and it hands number-like text to sympy's `parse_expr`, which evaluates
    Python. The steps below are the ones that it takes for the content of a box.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex  # type: ignore[import-untyped]
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped]
    from math_verify.grader import should_treat_as_complex  # type: ignore[import-untyped]

    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        plain = normalize_latex(text, config)
        parsed = latex2sympy(
            plain,
            is_real=not should_treat_as_complex(plain),
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


def _sides(expression: Any) -> list[Any]:
    """a, b, c of a = b = c; an expression alone is its only side."""
    from sympy import And, Eq  # type: ignore[import-untyped]

    if isinstance(expression, Eq):
        return [expression.lhs, expression.rhs]
    if isinstance(expression, And):
        links = getattr(expression, "_unsorted_args", expression.args)
        if links and all(isinstance(link, Eq) for link in links):
            return [links[0].lhs, *(link.rhs for link in links)]
    return [expression]


def _contradicts_itself(expression: Any) -> bool:
    """Whether an answer a = b = c names several answers: 4 = 5, or y = 3x = 2x.

    math-verify takes the last side. The first side may be a name, as in y = 2x and f(x) = 2x, and
    a side with other variables than the last is a formula: A = pi r^2 = 9 pi.
    """
    from sympy import FiniteSet, Tuple
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

    if isinstance(expression, FiniteSet | Tuple):
        return any(_contradicts_itself(element) for element in expression.args)
    sides = _sides(expression)
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


def _same_equation(gold: Any, predicted: Any) -> bool:
    """Whether a = b and c = d say the same: a - b is a number, not 0, times c - d."""
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
        ratio = cancel(wanted / given)
        return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)
    except MemoryError:
        raise
    except Exception:
        return False  # what sympy cannot divide it does not prove


def _same_range(gold: Any, predicted: Any) -> bool:
    """Whether a relation in one variable is an answer to a gold that is its interval."""
    from sympy import Set
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    if not isinstance(gold, Set) or not isinstance(predicted, Relational):
        return False
    if len(predicted.free_symbols) != 1:
        return False
    try:
        return bool(predicted.as_set() == gold)
    except MemoryError:
        raise
    except Exception:
        return False  # of a relation that sympy cannot solve


def _differ_at_a_point(gold: Any, predicted: Any) -> bool:
    """Whether two formulas have clearly different values with numbers in place of their variables.

    Most wrong answers do, and seeing it takes 1 ms where sympy's attempts to simplify take 30.
    Only where math-verify compares values: not for equations, sets, percentages or names.
    """
    from sympy import Expr, Float, Symbol, UnevaluatedExpr

    equations = [len(_sides(side)) > 1 for side in (gold, predicted)]
    if all(equations):
        return False
    a, b = (_sides(side)[-1] for side in (gold, predicted))
    for side in (a, b):
        if not isinstance(side, Expr) or isinstance(side, Symbol) or side.has(UnevaluatedExpr):
            return False
    # Positive, so that roots and logarithms stay real; unrelated, so that unequal formulas differ.
    point = {
        symbol: Float(0.6180339887 + 0.4142135624 * index)
        for index, symbol in enumerate(sorted(a.free_symbols | b.free_symbols, key=str))
    }
    try:
        x, y = (complex(side.subs(point).evalf(15)) for side in (a, b))
    except MemoryError:
        raise
    except Exception:
        # No value there, as for an unknown function.
        return False
    return abs(x - y) > max(1e-3 * max(abs(x), abs(y)), 1e-3)


def _far_apart(gold: Any, predicted: Any) -> bool:
    """Whether two numbers that math-verify calls equal differ by more than rounding explains."""
    from sympy import Expr, UnevaluatedExpr

    a, b = (_sides(side)[-1] for side in (gold, predicted))
    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return False
    # 52% equals 52 and 0.52: math-verify's rule, kept.
    if a.has(UnevaluatedExpr) or b.has(UnevaluatedExpr) or not (a.is_number and b.is_number):
        return False
    try:
        x, y = (complex(side.doit().evalf(20)) for side in (a, b))
    except (TypeError, ValueError, OverflowError):
        # Too large for a float, or infinite: rounding to six decimals is not what made them equal.
        return False
    if x == 0:
        return abs(y) > 1e-12
    return abs(x - y) > RELATIVE_TOLERANCE * max(abs(x), abs(y))
