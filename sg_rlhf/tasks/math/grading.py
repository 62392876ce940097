r"""Grading of mathematics answers: one grader for training rewards and for evaluation.

The last complete box of the response is compared with each gold answer: first as text, then as
exact numbers, and only what neither decides goes to math-verify, in a pool of processes that are
killed when they take too long. A response decides nothing but its own verdict: whatever it holds,
grading ends in time, runs none of it and raises nothing.

What counts as equal beyond the obvious: 142.0 and 142; decimals that agree to six places and 1 in
10,000; 52, 52% and .52 if one of them is written as a percentage; x = 5, 5 = x and 5; equations in
another arrangement; a relation and its interval; sets and lists in any order, but with all their
elements, and 2 \pm \sqrt{3} as the two that it is; C for c as a constant of integration; words
without regard to case; degrees, currency and units, which are not needed. What does not: R and r,
dx/dt and 0, i and I, 5 m and 5 km, 2t and 2, several candidates for one gold, unequal sides (4 =
5), text with a digit or an "or" beside the answer. docs/evaluation.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.guards import MAX_CHARACTERS, reject_reason
from sg_rlhf.tasks.math.answers.normalize import equal_exactly, normalize
from sg_rlhf.tasks.math.answers.pool import WorkerPool, shared_pool
from sg_rlhf.tasks.math.answers.reason import Reason
from sg_rlhf.tasks.math.answers.worker import compare

__all__ = ["Grade", "Reason", "WorkerPool", "grade", "grade_many", "last_box"]


def grade(response: str, golds: str | Sequence[str], pool: WorkerPool | None = None) -> Grade:
    r"""Grade a response (the text after the prompt) against its golds, any of which is right.

    Thread-safe. Microseconds for an answer that text or exact numbers decide, milliseconds for one
    that needs math-verify, the pool's limit plus 0.2 s at most; the first one starts the pool.

    The reward is 1 or 0; `extracted` is the text of the box that was graded, None where the
    response has none, and `format_ok` says whether there is one.

    >>> found = grade(r"So it is $\boxed{\frac{6}{8}}$.", "3/4")
    >>> (found.reward, found.reason, found.extracted)
    (1.0, <Reason.CORRECT: 'correct'>, '\\frac{6}{8}')

    Args:
        golds: as in the data, with or without dollar signs.
        pool: the workers for what needs math-verify; by default the process's own (`shared_pool`).

    Raises:
        ValueError: no golds, or an empty one: a fault of the data, not of the response.
    """
    return _begin(response, golds, pool)()


def grade_many(
    pairs: Iterable[tuple[str, str | Sequence[str]]],
    pool: WorkerPool | None = None,
    on_graded: Callable[[], object] | None = None,
) -> list[Grade]:
    """Grade (response, golds) pairs, those that need math-verify in parallel; keeps their order.

    `on_graded` is called once for each graded pair, in order, for a progress bar.

    Raises:
        ValueError: as `grade`.
    """
    grades = []
    for finish in [_begin(response, golds, pool) for response, golds in pairs]:
        grades.append(finish())
        if on_graded is not None:
            on_graded()
    return grades


def _begin(
    response: str, golds: str | Sequence[str], pool: WorkerPool | None
) -> Callable[[], Grade]:
    """Decide what can be decided now, queue the rest; the result finishes the work."""
    golds = (golds,) if isinstance(golds, str) else tuple(golds)
    if not golds or not all(gold.strip() for gold in golds):
        raise ValueError(f"no gold answer, or an empty one, in {list(golds)!r}")
    extracted = last_box(response)
    decided = decide(extracted, golds)
    if isinstance(decided, Reason):
        return lambda: _graded(extracted, decided)
    verdict = (pool or shared_pool()).submit(compare, *decided)
    return lambda: _graded(extracted, verdict())


def decide(extracted: str | None, golds: tuple[str, ...]) -> Reason | tuple[str, tuple[str, ...]]:
    """The verdict on a box by spelling and exact numbers alone.

    Returns:
        The reason, or the normalised answer and golds that only math-verify can compare.
    """
    if extracted is None:
        return Reason.NO_BOX
    if not extracted:
        return Reason.EMPTY_BOX
    # Tidying is for answers; a box with a whole proof in it is not worth the time.
    if len(extracted) > 4 * MAX_CHARACTERS:
        return Reason.TOO_LONG
    verdicts = [equal_exactly(extracted, gold) for gold in golds]
    if True in verdicts:
        return Reason.CORRECT
    answer = normalize(extracted)
    refused = reject_reason(answer) if answer else Reason.UNPARSEABLE
    if refused is not None:
        return refused
    undecided = tuple(
        normalize(gold) for gold, verdict in zip(golds, verdicts, strict=True) if verdict is None
    )
    return (answer, undecided) if undecided else Reason.WRONG


def _graded(extracted: str | None, reason: Reason) -> Grade:
    correct = reason is Reason.CORRECT
    return Grade(
        reward=float(correct),
        correct=correct,
        reason=reason,
        extracted=extracted,
        format_ok=extracted is not None,
        logs={
            "timeout": float(reason is Reason.TIMEOUT),
            "crash": float(reason is Reason.CRASH),
        },
    )
