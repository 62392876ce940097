r"""Grade mathematics answers: one grader for training rewards and for evaluation.

`grade` takes the last complete box of the response and compares it with each reference answer:

1. `normalize`: one spelling for both; equal texts and exact numbers decide.
2. `guards`: reject what is too large, code, or several answers.
3. In a killable process (`pool`): `lists` compares element by element, `symbolic` each value.

`answers.table` lists the rules of these steps with their examples. A response decides nothing but
its own verdict: whatever it holds, grading ends in time, runs none of it and raises nothing.
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
    r"""Grade a response (the text after the prompt).

    Thread-safe. Takes microseconds where text or exact numbers decide, milliseconds where
    math-verify does, at most the pool's limit plus 0.2 s. The first such answer starts the pool.

    >>> found = grade(r"So it is $\boxed{\frac{6}{8}}$.", "3/4")
    >>> (found.reward, found.reason, found.extracted)
    (1.0, <Reason.CORRECT: 'correct'>, '\\frac{6}{8}')

    Args:
        golds: the reference answers, any of which is right; with or without dollar signs.
        pool: the workers for what needs math-verify; by default the process's own (`shared_pool`).

    Returns:
        Reward 1 or 0; `extracted`, the text of the box, or None without one; `format_ok`, whether
        there is a box.

    Raises:
        ValueError: no reference answer, or an empty one: a fault of the data.
    """
    return _begin(response, golds, pool)()


def grade_many(
    pairs: Iterable[tuple[str, str | Sequence[str]]], pool: WorkerPool | None = None
) -> list[Grade]:
    """Grade (response, golds) pairs, those that need math-verify in parallel; keeps their order.

    Raises:
        ValueError: as `grade`.
    """
    begun = [_begin(response, golds, pool) for response, golds in pairs]
    return [finish() for finish in begun]


def _begin(
    response: str, golds: str | Sequence[str], pool: WorkerPool | None
) -> Callable[[], Grade]:
    """Decide what can be decided now, queue the rest; the result finishes the work."""
    golds = (golds,) if isinstance(golds, str) else tuple(golds)
    if not golds or not all(gold.strip() for gold in golds):
        raise ValueError(f"no reference answer, or an empty one, in {list(golds)!r}")
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
