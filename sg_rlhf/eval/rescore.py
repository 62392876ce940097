"""Stored responses graded again: ``sg-rlhf eval --rescore DIR``.

No model is loaded and nothing is sampled. The stored responses and reference answers are graded by
the graders of today's code and of `--grader`, into a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from sg_rlhf.common.argument_types import progress_bar
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.run_config import run_of
from sg_rlhf.eval import contamination
from sg_rlhf.eval.command_line import CommandLine, dated_folder, find_suite, names_in
from sg_rlhf.eval.contamination import TrainingOverlap
from sg_rlhf.eval.engines.base import verdict
from sg_rlhf.eval.scores import results, tables
from sg_rlhf.eval.scores.compare import (
    RunResults,
    as_run,
    known_benchmarks,
    read_run_results,
    selected,
)
from sg_rlhf.eval.store import SAMPLES, Row, Store, key_of
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Setup, Suite

#: Options with a meaning here, apart from those of the suite.
OPTIONS = {"--rescore", "--suite", "--out", "--resume", "--only", "--k"}
#: Responses that are graded and written at a time.
CHUNK = 256


def rescore(line: CommandLine, console: Console) -> int:
    """Grade the responses of a finished run again and write its report; the exit status."""
    args = line.args
    side = read_run_results("--rescore", args.rescore)
    if args.suite is None:
        args.suite = side.request["suite"]
    suite = find_suite(line)
    line.refuse_all_but({*OPTIONS, *suite.options}, "has no effect on stored responses")
    benchmarks = _benchmarks(suite, side, names_in(args.only), args.k)
    if args.out is None:
        args.out = dated_folder(f"{suite.name}_rescored")
        print(f"--out {args.out}", flush=True)
    with ExitStack() as resources:
        prepared = suite.prepare(Setup(benchmarks, line.suite_values, resources, regrade=True))
        request = _request(side, benchmarks, prepared.request)
        store = resources.enter_context(Store(args.out, args.resume))
        done = store.begin(request)
        begun = store.write_request(request, side.begun)
        total = sum(len(side.rows[benchmark.name]) for benchmark in benchmarks)
        with progress_bar("grading", "response", total) as bar:
            bar.update(len(done))
            for benchmark in prepared.benchmarks:
                left = [row for row in side.rows[benchmark.name] if key_of(row) not in done]
                for start in range(0, len(left), CHUNK):
                    store.append(_graded(benchmark, left[start : start + CHUNK]))
                    bar.update(len(left[start : start + CHUNK]))
        rows = list(store.begin(request).values())
        report, extra = results.build(suite, benchmarks, request, rows, begun, {}, _seen(side))
        report["rescored"] = {**request["rescored"], "changes": _changes(side, rows)}
        tables.write(report, extra, suite, args.out, console)
    return 0


def _benchmarks(
    suite: Suite, side: RunResults, only: Sequence[str], ks: Sequence[int] | None
) -> list[Benchmark]:
    """The selected benchmarks of the stored run, with its settings."""
    if side.request["suite"] != suite.name:
        raise EvalError(
            f"--suite {suite.name}: {side.folder} is a run of suite {side.request['suite']}"
        )
    known = known_benchmarks(suite, side)
    names = selected(suite, known, list(side.request["benchmarks"]), only, str(side.folder))
    for name in names:
        if any("dialogue" in row for row in side.rows[name]):
            raise EvalError(
                f"--rescore {side.folder}: {name} holds dialogues, which are graded from their "
                "tokens; expected a run with one response per prompt"
            )
    return [as_run(known[name], [side], ks) for name in names]


def _request(
    side: RunResults, benchmarks: Sequence[Benchmark], graders: Mapping[str, Any]
) -> dict[str, Any]:
    kept = {key: value for key, value in side.request.items() if key != "graders"}
    return {
        **kept,
        **graders,
        "rescored": {"from": str(side.folder), "samples_sha256": sha256_of(side.folder / SAMPLES)},
        "benchmarks": {
            each.name: {**side.request["benchmarks"][each.name], "pass_at": list(each.pass_at)}
            for each in benchmarks
        },
    }


def _graded(benchmark: Benchmark, rows: Sequence[Row]) -> list[Row]:
    """Stored samples with new verdicts."""
    grades = benchmark.grade([(row["response"], row["gold"]) for row in rows])
    kept = [{key: value for key, value in row.items() if key != "graders"} for row in rows]
    return [{**row, **verdict(grade)} for row, grade in zip(kept, grades, strict=True)]


def _changes(side: RunResults, rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Per benchmark, how many verdicts are other ones than before."""
    before = {key_of(row): bool(row["correct"]) for part in side.rows.values() for row in part}
    changes: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = changes.setdefault(
            row["benchmark"], {"responses": 0, "now_correct": 0, "now_wrong": 0}
        )
        counts["responses"] += 1
        if bool(row["correct"]) != before[key_of(row)]:
            counts["now_correct" if row["correct"] else "now_wrong"] += 1
    return changes


def _seen(side: RunResults) -> TrainingOverlap:
    """The model's family. Its training data is not compared again: that needs the questions."""
    model = side.request["model"]["name"]
    family = contamination.family(model, run_of(model))
    problem = f"not compared by --rescore; see results.json in {side.folder}"
    return TrainingOverlap(family, {"problem": problem})
