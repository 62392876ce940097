"""Both error rates of the grader on every suite, and of an earlier commit's on the same answers.

    git worktree add ../before de9d238
    python -m lab.experiments.graders.suites --data-dir data/math --before ../before \\
        --out lab/experiments/graders/results/grading_suites.json

A suite is a list of answers that are known to be right or wrong: the cases of other graders' tests
as `verdicts.tsv` judges them (those out of scope left out), the tests' own tables, rewrites and
certified mutations of the golds, changes of every gold, and published responses of models as
`lab.experiments.graders.real` judges them, whose result is read from `--real`. The earlier grader
runs in a process of its own, from the checkout, with the packages of this one.
`docs/make_grades.py` makes the table of README.md of the result.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench.common import write
from lab.experiments.graders import cases, fetch_cases, options, responses
from lab.experiments.graders.cases import Case
from lab.experiments.graders.grade_changes import HARMLESS, changes, more_than_a_number
from lab.experiments.graders.mutations import MUTATIONS, REWRITES, make
from lab.experiments.graders.outside_cases import (
    ARGUABLE,
    OUT_OF_SCOPE,
    STATES_NONE,
    Verdict,
    read_verdicts,
)
from lab.experiments.graders.real import key
from lab.experiments.graders.self_grading import FILES, read_golds
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.compare import RULES
from sg_rlhf.tasks.math.grading import WorkerPool, grade_many
from tests.unit.tasks.math import test_grading

TITLES = {
    "math_verify": "Math-Verify's tests",
    "qwen": "Qwen2.5-Math's",
    "hendrycks": "Hendrycks' `is_equiv`",
    "inspect_ai": "inspect_ai's",
    "tinker": "tinker-cookbook's",
    "slime": "slime's",
    "lighteval": "lighteval's",
}
#: The suites that are made from the data's reference answers.
MADE = ("golds written otherwise", "golds with one certified change", "changes of every gold")
#: Runs in the earlier checkout: pairs from standard input, verdicts to standard output.
_EARLIER = """
import json, sys
from sg_rlhf.tasks.math.grading import WorkerPool, grade_many
pool = WorkerPool(2)
pairs = [(response, golds) for response, golds in json.load(sys.stdin)]
print(json.dumps([grade.correct for grade in grade_many(pairs, pool)]))
pool.close()
"""


class Answer(NamedTuple):
    """A response, its golds, and whether it is right."""

    response: str
    golds: tuple[str, ...]
    right: bool


def boxed(answer: str, gold: str, right: bool) -> Answer:
    """An answer alone, in its box."""
    return Answer(rf"\boxed{{{answer}}}", (gold,), right)


def outside(cache: Path, given: Mapping[str, Path]) -> dict[str, list[Answer]]:
    """The cases of other graders' tests, each in the first suite that has it."""
    verdicts = read_verdicts()
    unique: dict[tuple[str, str], Case] = {}
    for suite, paths in fetch_cases.fetch(cache, given).items():
        for case in cases.read(suite, paths):
            unique.setdefault((case.gold, case.answer), case)
    found: dict[str, list[Answer]] = {TITLES[suite]: [] for suite in fetch_cases.SUITES}
    for case in unique.values():
        right = truth(case, verdicts)
        if right is not None:
            found[TITLES[case.suite]].append(Answer(case.response, (case.truth,), right))
    return found


def truth(case: Case, verdicts: Mapping[tuple[str, str], Verdict]) -> bool | None:
    """Whether a case's answer is right; None where it is out of scope."""
    verdict = verdicts.get((case.suite, case.key))
    due = case.expected
    if verdict is not None:
        due = verdict.expected if due is None else due
        if verdict.kind != STATES_NONE:
            return {OUT_OF_SCOPE: None, ARGUABLE: not due}.get(verdict.kind, due)
    one_box = case.response.count("\\boxed") == 1 and "\\boxed" not in case.truth
    return due if one_box else None


def tests() -> dict[str, list[Answer]]:
    """The examples of the rules, and the tables of the tests."""
    right = [pair for rule in RULES for pair in rule.right]
    wrong = [pair for rule in RULES for pair in rule.near_misses]
    right += [pair for pairs in test_grading.RIGHT.values() for pair in pairs]
    wrong += [pair for pairs in test_grading.NEAR_MISSES.values() for pair in pairs]
    wrong += [pair for pairs in test_grading.NOT_RIGHT.values() for pair in pairs]
    return {
        "hand-made forms and near misses": [
            boxed(answer, gold, is_right)
            for pairs, is_right in ((right, True), (wrong, False))
            for answer, gold in dict.fromkeys(pairs)
        ]
    }


def of_the_golds(data_dir: Path, seed: int) -> dict[str, list[Answer]]:
    """Rewrites, mutations, and a change of each kind to every gold that is more than a number."""
    files = [data_dir / name for name in FILES if (data_dir / name).is_file()]
    golds = [gold for file in files for gold in read_golds(file)]
    made = [
        *make(golds, REWRITES, 10_000, True, seed),
        *make(golds, MUTATIONS, 5_000, False, seed),
    ]
    chance = random.Random(seed)
    texts = more_than_a_number(gold.text for gold in golds)
    changed = [
        boxed(text, gold, kind in HARMLESS)
        for gold in texts
        for kind, text in changes(gold, chance)
    ]
    return {
        "golds written otherwise": [boxed(m.answer, m.gold.text, True) for m in made if m.right],
        "golds with one certified change": [
            boxed(m.answer, m.gold.text, False) for m in made if not m.right
        ],
        "changes of every gold": changed,
    }


def published(args: argparse.Namespace) -> dict[str, list[Answer]]:
    """Responses of models."""
    found = responses.read(responses.fetch(args.responses, {}), args.data_dir)
    right = set(json.loads(args.real.read_text())["right"])
    answers = []
    for one in found:
        answer = last_box(one.text)
        answers.append(
            Answer(one.text, one.golds, bool(answer) and key(one.golds, str(answer)) in right)
        )
    return {"published responses": answers}


def all_suites(args: argparse.Namespace) -> dict[str, list[Answer]]:
    """Suite -> its answers.

    Raises:
        ValueError, OSError: a file is missing or another one than pinned.
    """
    return {
        **outside(args.cases, {}),
        **tests(),
        **of_the_golds(args.data_dir, args.seed),
        **published(args),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where the answers are."""
    options.add(parser, "--data-dir", "--out", "--seed", "--date")
    parser.add_argument("--cases", type=Path, default=fetch_cases.CACHE, metavar="DIR")
    parser.add_argument("--responses", type=Path, default=responses.CACHE, metavar="DIR")
    parser.add_argument(
        "--real", type=Path, default=Path("lab/experiments/graders/results/real_responses.json")
    )


def errors(answers: Sequence[Answer], verdicts: Sequence[bool]) -> dict[str, int]:
    """False positives and negatives."""
    pairs = list(zip(answers, verdicts, strict=True))
    return {
        "false_positives": sum(correct and not one.right for one, correct in pairs),
        "false_negatives": sum(one.right and not correct for one, correct in pairs),
    }


def ours(answers: Sequence[Answer]) -> list[bool]:
    """Verdicts of this grader."""
    pool = WorkerPool(2)
    grades = grade_many([(one.response, list(one.golds)) for one in answers], pool)
    pool.close()
    return [grade.correct for grade in grades]


def earlier(checkout: Path) -> Callable[[Sequence[Answer]], list[bool]]:
    """Verdicts of the grader of a checkout."""

    def verdicts(answers: Sequence[Answer]) -> list[bool]:
        pairs = json.dumps([(one.response, list(one.golds)) for one in answers])
        environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", _EARLIER], input=pairs, env=environment, cwd=checkout,
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        found: list[bool] = json.loads(done.stdout.splitlines()[-1])
        return found

    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.suites",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--texts", type=Path, help="write the errors with their texts here")
    args = parser.parse_args(argv)
    if not (args.before / "sg_rlhf" / "tasks" / "math" / "grading.py").is_file():
        parser.error(f"--before {args.before}: not a checkout of this project")
    try:
        suites = all_suites(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=args.before, capture_output=True, text=True
    )
    before = earlier(args.before.resolve())
    table: dict[str, Any] = {}
    texts = []
    for name, answers in suites.items():
        now, then = ours(answers), before(answers)
        right = sum(one.right for one in answers)
        table[name] = {
            "right": right,
            "wrong": len(answers) - right,
            "before": errors(answers, then),
            "after": errors(answers, now),
        }
        print(f"{name}: {table[name]}", flush=True)
        texts += [
            {"suite": name, "gold": one.golds, "answer": last_box(one.response), "right": one.right}
            for one, correct in zip(answers, now, strict=True)
            if correct is not one.right
        ]
    versions = {name: metadata.version(name) for name in ("math-verify", "sympy")}
    result = {
        "command": "python -m lab.experiments.graders.suites "
        "--data-dir data/math --before CHECKOUT",
        "date": args.date,
        "versions": {**versions, "python": platform.python_version()},
        "before": commit.stdout.strip(),
        "suites": table,
    }
    write(result, args.out)
    if args.texts:
        args.texts.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
