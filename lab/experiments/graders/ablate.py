"""The effect of each rule of the grader: the verdicts that change without it.

    python -m lab.experiments.graders.ablate --data-dir data/math --out FILE

The answers are those of `lab.experiments.graders.suites`. A first pass notes which rules do
something with which answer; then each rule is left out, and these answers are graded again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

from lab.bench.common import write
from lab.experiments.graders import suites
from lab.experiments.graders.suites import Answer
from sg_rlhf.tasks.math.answers import compare, lists, normalize, rewrites, symbolic
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.compare import RULES, TABLES
from sg_rlhf.tasks.math.answers.rules import Reason, Rule
from sg_rlhf.tasks.math.grading import decide

LIMIT_S = 2.0
CACHED = (
    normalize.normalize,
    normalize._with_units,
    normalize.canonical,
    normalize.parse_number,
    lists.read,
)
#: Rules on parsed values; without any other one `symbolic` says the same of two texts.
PARSED = {rule.name for rule in (*rewrites.SYMBOLS, *symbolic.ALONE, *symbolic.TOGETHER)}
_verdicts: dict[tuple[str, str], Reason] = {}
_answers: list[tuple[str | None, tuple[str, ...]]] = []


class _OutOfTimeError(BaseException):
    pass


def _out_of_time(*_: object) -> None:
    raise _OutOfTimeError


def forget() -> None:
    """Empty the caches, whose values are those of other rules."""
    for function in CACHED:
        function.cache_clear()


def is_correct(box: str | None, golds: tuple[str, ...]) -> bool:
    """The grader's verdict, in this process."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        found = decide(box, golds)
        found = found if isinstance(found, Reason) else compare.compare_with_any(*found)
        return found is Reason.CORRECT
    except (_OutOfTimeError, Exception):  # as the pool: a crash
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@contextmanager
def changed(change: Callable[[Rule], Rule | None]) -> Iterator[None]:
    """The grader with each rule replaced, or left out."""
    with ExitStack() as stack:
        for module, name in TABLES:
            rules = tuple(new for rule in getattr(module, name) if (new := change(rule)))
            stack.enter_context(mock.patch.object(module, name, rules))
        forget()
        yield
    forget()


def _begin(answers: list[tuple[str | None, tuple[str, ...]]]) -> None:
    signal.signal(signal.SIGPROF, _out_of_time)
    logging.disable(logging.CRITICAL)
    _answers[:] = answers


def _remembered(compare: Callable[[str, str], Reason]) -> Callable[[str, str], Reason]:
    def known(reference: str, answer: str) -> Reason:
        if (reference, answer) not in _verdicts:
            _verdicts[reference, answer] = compare(reference, answer)
        return _verdicts[reference, answer]

    return known


def used(index: int) -> tuple[bool, set[str]]:
    """The verdict on an answer, and the rules that do something with it."""
    names = set()

    def noted(rule: Rule) -> Rule:
        def apply(*args: Any) -> Any:
            found = rule.apply(*args)
            if found is not None and found != args[0] and found != [args[0]]:
                names.add(rule.name)
            return found

        return replace(rule, apply=apply)

    with changed(noted):
        return is_correct(*_answers[index]), names


def without(task: tuple[str, list[int]]) -> list[bool]:
    """The verdicts on some answers without a rule."""
    name, indexes = task
    with ExitStack() as stack:
        if name not in PARSED:
            remembered = _remembered(symbolic.equivalent)
            stack.enter_context(mock.patch.object(symbolic, "equivalent", remembered))
        stack.enter_context(changed(lambda rule: None if rule.name == name else rule))
        return [is_correct(*_answers[index]) for index in indexes]


def effects(
    answers: Sequence[tuple[str, Answer]], names: Collection[str] | None = None
) -> tuple[list[bool], dict[str, list[tuple[int, bool]]]]:
    """The verdicts, and rule -> those that change without it: (index, the verdict without it)."""
    places = defaultdict(list)
    for index, (_, one) in enumerate(answers):
        places[last_box(one.response), one.golds].append(index)
    unique = list(places)
    with multiprocessing.get_context("fork").Pool(2, _begin, (unique,)) as pool:
        numbers = range(len(unique))
        first = list(tqdm(pool.imap(used, numbers, 64), "all rules", len(unique), disable=None))
        tasks = [
            (rule.name, [i for i in numbers if rule.name in first[i][1]])
            for rule in RULES
            if names is None or rule.name in names
        ]
        found = list(tqdm(pool.imap(without, tasks), "without one", len(tasks), disable=None))
    verdicts = {place: first[i][0] for i, key in enumerate(unique) for place in places[key]}
    return [verdicts[place] for place in range(len(answers))], {
        name: [
            (place, verdict)
            for index, verdict in zip(indexes, without_it, strict=True)
            if verdict is not first[index][0]
            for place in places[unique[index]]
        ]
        for (name, indexes), without_it in zip(tasks, found, strict=True)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 with one line for missing files."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    suites.add_options(parser)
    parser.add_argument("--texts", type=Path, help="write the changed answers here")
    parser.add_argument(
        "--quick", action="store_true", help="without the answers made from references"
    )
    args = parser.parse_args(argv)
    try:
        found = suites.all_suites(args)
        if args.quick:
            found = {name: part for name, part in found.items() if name not in suites.MADE}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    answers = [(suite, one) for suite, part in found.items() for one in part]
    _, changes = effects(answers)
    rules = {}
    for rule in RULES:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for place, accepted in changes[rule.name]:
            suite, one = answers[place]
            counts[suite][_kind(one.right, accepted)] += 1
        rules[rule.name] = {"does": rule.does, **{suite: dict(c) for suite, c in counts.items()}}
    versions = {name: metadata.version(name) for name in ("math-verify", "sympy")}
    result = {
        "command": "python -m lab.experiments.graders.ablate --data-dir data/math --out OUT"
        + " --quick" * args.quick,
        "date": args.date,
        "versions": {**versions, "python": platform.python_version()},
        "answers": len(answers),
        "rules": rules,
    }
    write(result, args.out)
    if args.texts:
        listed = {
            name: [
                [answers[place][0], last_box(answers[place][1].response), answers[place][1].golds]
                for place, _ in places
            ]
            for name, places in changes.items()
        }
        args.texts.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    idle = [name for name, places in changes.items() if not places]
    print(f"{args.out}: {len(RULES)} rules; without any effect: {', '.join(idle) or 'none'}")
    return 0


def _kind(right: bool, accepted: bool) -> str:
    """The error, or the correct verdict, that leaving a rule out makes."""
    if right is accepted:
        return "mended"
    return "accepts wrong" if accepted else "rejects right"


if __name__ == "__main__":
    raise SystemExit(main())
