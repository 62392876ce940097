r"""Grade mathematics answers: one grader for training rewards and for evaluation.

`grade` takes the last complete box of the response (`boxed`) and compares it with each reference
answer:

1. `normalize`: one spelling for both; equal texts and exact numbers decide.
2. `guards`: reject what is too large, code, or several answers.
3. In a killable process (`pool`, `worker`): `compare` takes lists apart (`lists`) and compares each
   value (`symbolic`).

`answers.compare` lists the rules of these steps. A response decides nothing but its own verdict:
whatever it holds, grading ends in time, runs none of it and raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.guards import MAX_CHARACTERS, reject_reason
from sg_rlhf.tasks.math.answers.normalize import equal_exactly, normalize
from sg_rlhf.tasks.math.answers.pool import WorkerPool, shared_pool
from sg_rlhf.tasks.math.answers.rules import Reason

__all__ = ["Grade", "Reason", "WorkerPool", "compare", "grade", "grade_many", "last_box"]


def grade(response: str, golds: str | Sequence[str], pool: WorkerPool | None = None) -> Grade:
    r"""Grade a response (the text after the prompt). Thread-safe.

    Takes microseconds where text or exact numbers decide, milliseconds where math-verify does, at
    most the pool's limit plus 0.2 s. The first such answer starts the pool.

    >>> found = grade(r"So it is $\boxed{\frac{6}{8}}$.", "3/4")
    >>> (found.reward, found.reason, found.extracted)
    (1.0, <Reason.CORRECT: 'correct'>, '\\frac{6}{8}')

    Args:
        golds: the reference answers, any of which is right; none or an empty one is a `ValueError`.
        pool: by default the process's own (`shared_pool`).
    """
    return grade_many([(response, golds)], pool)[0]


def grade_many(
    pairs: Iterable[tuple[str, str | Sequence[str]]], pool: WorkerPool | None = None
) -> list[Grade]:
    """Grade (response, golds) pairs, those that need math-verify in parallel; keeps their order."""
    decided: list[tuple[str | None, Reason | Future[str]]] = []
    for response, golds in pairs:
        golds = (golds,) if isinstance(golds, str) else tuple(golds)
        if not golds or not all(gold.strip() for gold in golds):
            raise ValueError(f"no reference answer, or an empty one, in {list(golds)!r}")
        box = last_box(response)
        found = decide(box, golds)
        if isinstance(found, Reason):
            decided.append((box, found))
        else:
            decided.append((box, (pool or shared_pool()).submit(compare, *found)))
    return [
        _graded(box, found if isinstance(found, Reason) else Reason(found.result()))
        for box, found in decided
    ]


def decide(box: str | None, golds: tuple[str, ...]) -> Reason | tuple[str, tuple[str, ...]]:
    """The verdict by spelling and exact numbers alone, or what only math-verify can compare."""
    if box is None:
        return Reason.NO_BOX
    if not box:
        return Reason.EMPTY_BOX
    # Tidying is for answers; a box with a whole proof in it is not worth the time.
    if len(box) > 4 * MAX_CHARACTERS:
        return Reason.TOO_LONG
    verdicts = [equal_exactly(box, gold) for gold in golds]
    if True in verdicts:
        return Reason.CORRECT
    answer = normalize(box)
    refused = reject_reason(answer) if answer else Reason.UNPARSEABLE
    if refused is not None:
        return refused
    undecided = tuple(
        normalize(gold) for gold, verdict in zip(golds, verdicts, strict=True) if verdict is None
    )
    return (answer, undecided) if undecided else Reason.WRONG


def compare(answer: str, references: Sequence[str]) -> Reason:
    """In a worker: compare a normalised answer with normalised references, any of them right."""
    # Imports sympy, which the trainer pays for neither in seconds nor in memory.
    from sg_rlhf.tasks.math.answers.compare import compare_with_any

    return compare_with_any(answer, references)


def _graded(box: str | None, reason: Reason) -> Grade:
    correct = reason is Reason.CORRECT
    return Grade(
        reward=float(correct),
        correct=correct,
        reason=reason,
        extracted=box,
        format_ok=box is not None,
        logs={
            "timeout": float(reason is Reason.TIMEOUT),
            "crash": float(reason is Reason.CRASH),
        },
    )
