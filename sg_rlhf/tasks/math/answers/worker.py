"""What runs in a grading worker: math-verify on one answer, with no time-out of its own.

This module is imported by the trainer too, but sympy and math-verify only in `warm_up`, which the
pool calls in its workers.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal

from sg_rlhf.tasks.math.answers import lists, sandbox
from sg_rlhf.tasks.math.answers.normalize import equal_exactly
from sg_rlhf.tasks.math.answers.reason import Reason
from sg_rlhf.tasks.math.answers.symbolic import equivalent

_REASON = {True: Reason.CORRECT, False: Reason.WRONG}


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
    sandbox.enter_sandbox()


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
    seen = set()
    for gold in golds:
        reason = _compare_one(answer, gold)
        if reason is Reason.CORRECT:
            return reason
        seen.add(reason)
    # What is wrong with the answer itself comes before what its golds are like.
    order = (Reason.UNPARSEABLE, Reason.AMBIGUOUS, Reason.WRONG, Reason.UNREADABLE_GOLD)
    return next(reason for reason in order if reason in seen)


def _compare_one(answer: str, gold: str) -> Reason:
    """The verdict on an answer that may be a list, by its elements."""
    seen = set()

    def same_values(wanted: str, given: str) -> bool:
        decided = equal_exactly(given, wanted)
        reason = _REASON[decided] if decided is not None else equivalent(wanted, given)
        seen.add(reason)
        return reason is Reason.CORRECT

    listed = lists.equal(gold, answer, same_values)
    if listed is None:
        return equivalent(gold, answer)
    if listed:
        return Reason.CORRECT
    for reason in (Reason.AMBIGUOUS, Reason.UNREADABLE_GOLD, Reason.UNPARSEABLE):
        if reason in seen:
            return reason
    return Reason.WRONG
