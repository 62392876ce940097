"""Our grader on the test cases of seven others, with a verdict on each disagreement.

    python -m lab.experiments.graders.fetch_cases
    python -m lab.experiments.graders.outside_cases --label before --out FILE

The second line again with `--label after` adds a column: the file keeps one entry for each label. A
Markdown table is written beside it. `verdicts.tsv` says for each disagreement who is right; one
that is not in it is listed as `unjudged`, and with `--strict` ends in status 1, as does one in
which ours accepts an answer that is wrong. An answer without a box, or with several, is out of
scope by itself: our prompt asks for one box.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.bench.common import write
from lab.experiments.graders import cases, fetch_cases, options
from lab.experiments.graders.cases import Case
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.math.grading import Grade, WorkerPool, grade_many

VERDICTS = Path(__file__).with_name("verdicts.tsv")
OURS_WRONG, ARGUABLE, OUT_OF_SCOPE = "ours wrong", "theirs arguable", "out of scope"
UNJUDGED = "unjudged"
#: The suite says nothing; the verdict says what is right.
STATES_NONE = "states none"
KINDS = (OURS_WRONG, ARGUABLE, OUT_OF_SCOPE, UNJUDGED)


@dataclass(frozen=True)
class Verdict:
    """Who is right about one case, and why.

    Attributes:
        expected: what the case should come to where its suite states nothing.
    """

    kind: str
    why: str
    expected: bool | None = None


def read_verdicts(path: Path = VERDICTS) -> dict[tuple[str, str], Verdict]:
    """(suite, key of the case) -> verdict.

    Raises:
        ValueError: a row has another kind, or a case stands there twice.
    """
    found: dict[tuple[str, str], Verdict] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            place = row["suite"], row["key"]
            if row["verdict"] not in (*KINDS[:3], STATES_NONE) or place in found:
                raise ValueError(f"{path}: {place}: twice, or verdict {row['verdict']!r}")
            due = {"right": True, "wrong": False, "": None}[row["expected"]]
            found[place] = Verdict(row["verdict"], row["why"], due)
    return found


@dataclass(frozen=True)
class Outcome:
    """One case and what ours says of it; `kind` is empty where they agree."""

    case: Case
    expected: bool | None
    grade: Grade
    kind: str
    why: str


def judge(case: Case, grade: Grade, verdicts: Mapping[tuple[str, str], Verdict]) -> Outcome:
    """Compare one verdict with the suite's."""
    given = verdicts.get((case.suite, case.key))
    due = case.expected
    if due is None and given is not None:
        due = given.expected
    if grade.correct is due:
        return Outcome(case, due, grade, "", "")
    if given is not None and given.kind != STATES_NONE:
        return Outcome(case, due, grade, given.kind, given.why)
    if "\\boxed" not in case.response:
        return Outcome(case, due, grade, OUT_OF_SCOPE, "no box in the response")
    if case.response.count("\\boxed") > 1:
        return Outcome(case, due, grade, OUT_OF_SCOPE, "several boxes: ours reads the last")
    if case.truth.count("\\boxed"):
        return Outcome(case, due, grade, OUT_OF_SCOPE, "a box in the gold")
    return Outcome(case, due, grade, UNJUDGED, "")


def run(all_cases: Sequence[Case], pool: WorkerPool) -> list[Outcome]:
    """Grade every case."""
    verdicts = read_verdicts()
    grades = grade_many([(case.response, case.truth) for case in all_cases], pool)
    return [judge(case, grade, verdicts) for case, grade in zip(all_cases, grades, strict=True)]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """By suite: cases, disagreements by kind, and which they are."""
    suites: dict[str, Any] = {}
    for suite in fetch_cases.SUITES:
        part = [outcome for outcome in outcomes if outcome.case.suite == suite]
        differ = [outcome for outcome in part if outcome.kind]
        kinds = Counter(outcome.kind for outcome in differ)
        suites[suite] = {
            "cases": len(part),
            "disagree": len(differ),
            **{kind: kinds[kind] for kind in KINDS},
            "ours accepts what they reject": sum(o.grade.correct for o in differ),
            "false_positives": sum(o.grade.correct and o.kind == OURS_WRONG for o in differ),
            "listed": [
                {
                    "key": o.case.key,
                    "where": o.case.where,
                    "gold": short(o.case.truth),
                    "answer": short(o.case.answer),
                    "theirs": o.expected,
                    "ours": str(o.grade.reason),
                    "verdict": o.kind,
                    "why": o.why,
                }
                for o in differ
            ],
        }
    return suites


def short(text: str, limit: int = 60) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def markdown(result: Mapping[str, Any]) -> str:
    """The table of all labels, then every disagreement of the last."""
    labels = list(result["runs"])
    last = result["runs"][labels[-1]]["suites"]
    wrong = sum(suite[OURS_WRONG] for suite in last.values())
    false = sum(suite["false_positives"] for suite in last.values())
    total = sum(suite["cases"] for suite in last.values())
    lines = [
        "# Other graders' test cases",
        "",
        f"Of {total} cases, ours is wrong on {wrong}; on {false} of them it accepts a wrong answer "
        f"({labels[-1]}). `python -m lab.experiments.graders.outside_cases --label {labels[-1]}`, "
        f"{result['runs'][labels[-1]]['date']}.",
        "",
        "| suite | cases | "
        + " | ".join(f"{label}: {kind}" for label in labels for kind in ("disagree", *KINDS))
        + " |",
        "|---" * (2 + 5 * len(labels)) + "|",
    ]
    for suite in last:
        cells = [
            str(result["runs"][label]["suites"][suite][kind])
            for label in labels
            for kind in ("disagree", *KINDS)
        ]
        lines.append(f"| {suite} | {last[suite]['cases']} | {' | '.join(cells)} |")
    lines += [
        "",
        "Theirs is what the suite asks for; a case that an earlier suite has is left out.",
        "",
    ]
    for suite, found in last.items():
        if found["listed"]:
            lines += [f"## {suite}", "", "| gold | answer | theirs | ours | verdict | why |"]
            lines.append("|---|---|---|---|---|---|")
        for row in found["listed"]:
            theirs = {True: "right", False: "wrong", None: "not stated"}[row["theirs"]]
            cells = [cell(row["gold"]), cell(row["answer"]), theirs, row["ours"]]
            lines.append(f"| {' | '.join([*cells, row['verdict'], row['why']])} |")
        lines += [""] if found["listed"] else []
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text as code in a Markdown table."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|") if text.strip() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 with `--strict` for what must not be; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.outside_cases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fetch_cases.add_options(parser)
    options.add(parser, "--out", "--workers", "--date")
    parser.add_argument("--label", default="now", help="name of this run's column [now]")
    parser.add_argument("--strict", action="store_true", help="status 1 for unjudged or accepted")
    args = parser.parse_args(argv)
    try:
        files = fetch_cases.fetch(args.cache, dict(args.given))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    unique: dict[tuple[str, str], Case] = {}
    for suite, paths in files.items():
        for case in cases.read(suite, paths):
            unique.setdefault((case.gold, case.answer), case)
    pool = WorkerPool(args.workers)
    suites = summary(run(list(unique.values()), pool))
    pool.close()
    runs = json.loads(args.out.read_text())["runs"] if args.out.is_file() else {}
    versions = {name: metadata.version(name) for name in ("math-verify", "sympy")}
    versions["python"] = platform.python_version()
    entry = {"date": args.date, "versions": versions, "suites": suites}
    # Lists of cases are kept for the last run alone: the others are there for their counts.
    for old in runs.values():
        for suite in old["suites"].values():
            suite.pop("listed", None)
    runs.pop(args.label, None)
    pinned = {name: f"{o[0].repository}@{o[0].commit}" for name, o in fetch_cases.SUITES.items()}
    result = {"sources": pinned, "runs": {**runs, args.label: entry}}
    write(result, args.out)
    table = args.out.with_suffix(".md")
    table.write_text(markdown(result).rstrip() + "\n")
    bad = 0
    for name, found in suites.items():
        counts = ", ".join(f"{found[kind]} {kind}" for kind in KINDS)
        print(f"{name}: {found['cases']} cases, {found['disagree']} disagree: {counts}")
        bad += found[UNJUDGED] + found["false_positives"]
    print(f"{args.out} and {table.name}")
    return 1 if args.strict and bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
