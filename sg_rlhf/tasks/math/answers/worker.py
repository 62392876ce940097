"""What our grader runs in a worker of the pool: math-verify on one answer.

The trainer imports this module, but sympy and math-verify are imported in workers alone.
"""

from __future__ import annotations

from sg_rlhf.tasks.math.answers import lists
from sg_rlhf.tasks.math.answers.normalize import equal_exactly
from sg_rlhf.tasks.math.answers.reason import Reason

_REASON = {True: Reason.CORRECT, False: Reason.WRONG}


def warm_up() -> None:
    """Import the parser, and let it build its tables: half of the time to a first answer."""
    for text in (r"\frac{1}{2}", "x=5", "(1,2]", r"\sqrt{3}x^2"):
        compare(text, (text,))


def compare(answer: str, references: tuple[str, ...]) -> Reason:
    """Compare a normalised answer with normalised reference answers, any of which is right."""
    seen = set()
    for reference in references:
        reason = _compare_one(answer, reference)
        if reason is Reason.CORRECT:
            return reason
        seen.add(reason)
    # A fault of the answer itself comes before a fault of its reference answers.
    order = (Reason.UNPARSEABLE, Reason.AMBIGUOUS, Reason.WRONG, Reason.UNREADABLE_GOLD)
    return next(reason for reason in order if reason in seen)


def _compare_one(answer: str, reference: str) -> Reason:
    """The verdict on an answer that may be a list, by its elements."""
    from sg_rlhf.tasks.math.answers.symbolic import equivalent

    seen = set()

    def same_values(wanted: str, given: str) -> bool:
        decided = equal_exactly(given, wanted)
        reason = _REASON[decided] if decided is not None else equivalent(wanted, given)
        seen.add(reason)
        return reason is Reason.CORRECT

    listed = lists.equal(reference, answer, same_values)
    if listed is None:
        return equivalent(reference, answer)
    if listed:
        return Reason.CORRECT
    for reason in (Reason.AMBIGUOUS, Reason.UNREADABLE_GOLD, Reason.UNPARSEABLE):
        if reason in seen:
            return reason
    return Reason.WRONG
