"""Run a study: train every cell, then write tables and report pages.

A cell is one training run (regime, variant, seed) with its own run directory. The result of a
finished cell is kept under --out, and results.jsonl.gz there holds all of them. The cell is not run
again, here or after a fresh clone, until one of its settings changes. An interrupted cell resumes
from its last checkpoint. If only the measurements of a cell changed, it is measured again from its
checkpoint under --runs; without that checkpoint it is trained again. --list says which.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.study import decision
from lab.study import results as study_results
from lab.study import tables as study_tables
from lab.study.plan import Cell, Study, load_study
from lab.study.runner import CellError, Runner, State
from sg_rlhf.common.argument_types import OneLineParser, positive_int, progress_bar
from sg_rlhf.common.atomic_io import best_effort_output, write_whole
from sg_rlhf.config import ConfigError
from sg_rlhf.data_io import strict_json
from sg_rlhf.report.runs import RunError

EXAMPLES = """\
examples:
  what would be run, and what is there already
    python -m lab.study --study lab/experiments/kk_small/study.yaml --list
  the whole study, two runs at a time
    python -m lab.study --study lab/experiments/kk_small/study.yaml --jobs 2
  one regime of it
    python -m lab.study --study lab/experiments/kk_small/study.yaml --only 'base/*/s0'
  the tables and pages again, from the cells and the runs that are there
    python -m lab.study --study lab/experiments/kk_small/study.yaml --table

With GPUs each cell gets as many as the study says, and --jobs defaults to what fits.
"""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
    parser = OneLineParser(
        prog="python -m lab.study",
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument("--study", required=True, type=Path, metavar="FILE", help="the study")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results [lab/experiments/<study>]")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="run directories and data [runs/<study>]"
    )
    parser.add_argument(
        "--jobs", type=positive_int, metavar="N", help="runs at a time [what the GPUs hold, or 1]"
    )
    parser.add_argument(
        "--only", metavar="PATTERNS", help="cells by name, as in 'base/*' or '*/grpo/s0,base/tau_*'"
    )
    parser.add_argument("--list", action="store_true", help="list the cells and stop")
    parser.add_argument("--table", action="store_true", help="only write tables, pictures, pages")
    parser.add_argument(
        "--fix", action="store_true", help="write the hashes of the study's decision rule and stop"
    )
    parser.add_argument(
        "--verdict", action="store_true", help="only print the verdict by the fixed rule"
    )
    return parser.parse_args(argv)


def write_tables(study: Study, finished: dict[Cell, dict[str, Any]], out: Path) -> None:
    """results.jsonl.gz, results.json, results.md and differences.png of these cells."""
    study_results.write_record(out, finished.items())
    rows = study_results.summarize(study, finished.items())
    content = {"study": study.name, "cells": len(finished), "rows": rows}
    # The interval of one seed is NaN.
    write_whole(out / "results.json", strict_json.dumps(content) + "\n")
    write_whole(out / "results.md", study_tables.table(study, rows))
    if any(study_results.PEAK_RATIO in row for row in rows):
        from lab.study import plots as study_plots  # matplotlib: only where it draws

        study_plots.plot_differences(study, rows, out / "differences.png")


def write_pages(runner: Runner, finished: Iterable[Cell], regimes: set[str]) -> list[str]:
    """A report page for each of these regimes, of its finished runs; returns a line for each that
    could not be written.

    A run that was trained on another machine has no directory here, and is on no page.
    """
    from sg_rlhf.report import page  # matplotlib: only where it draws

    run_dirs: dict[str, list[Path]] = {}
    for cell in finished:
        if cell.regime in regimes and runner.run_dir(cell).is_dir():
            run_dirs.setdefault(cell.regime, []).append(runner.run_dir(cell))
    failures = []
    for regime, found in run_dirs.items():
        path = runner.runs / regime / "report.html"
        try:
            write_whole(path, page.build(*page.read_runs(found)))
        except RunError as error:
            failures.append(f"page of {regime}: {error}")
        else:
            print(f"page of the runs: {path}")
    return failures


def run_cells(runner: Runner, cells: list[Cell]) -> list[str]:
    """Train and measure; returns a line for each cell that failed."""
    failures = []
    jobs = runner.take_devices()
    with (
        progress_bar(runner.study.name, "runs", len(cells)) as bar,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        try:
            runner.make_data()
            futures = {pool.submit(runner.run, cell): cell for cell in cells}
            for future in concurrent.futures.as_completed(futures):
                cell = futures[future]
                try:
                    bar.write(describe(cell, future.result()["figures"]))
                except (CellError, ValueError, OSError) as error:
                    failures.append(f"{cell.name}: {error}")
                    bar.write(failures[-1], file=sys.stderr)
                bar.update()
        except KeyboardInterrupt:
            runner.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def describe(cell: Cell, figures: dict[str, Any]) -> str:
    """One line of a finished cell."""
    key = study_results.main_accuracy([figures])
    name = key.removesuffix("_after")
    # A run that does not evaluate at its start has no accuracy before.
    before = f"{figures[f'{name}_before']:.3f} -> " if f"{name}_before" in figures else ""
    accuracy = f"{name} {before}{figures[key]:.3f}, " if key in figures else ""
    return f"{cell.name}: {accuracy}largest gradient norm {figures['grad_norm_max']:.3g}"


def overview(states: Sequence[State]) -> str:
    """One line: how many runs are complete, and what is left."""
    left = [
        f"{count} {state.value}"
        for state in State
        if state is not State.DONE and (count := states.count(state))
    ]
    parts = [f"{states.count(State.DONE)} of {len(states)} runs are complete"]
    if left:
        parts.append(", ".join(left))
    if State.TO_TRAIN_AGAIN in states:
        parts.append("again: made with other settings, and the checkpoint is not under --runs")
    return "; ".join(parts)


def _chosen(cells: Sequence[Cell], patterns: str, study: Path) -> list[Cell]:
    """The cells whose names match one of the patterns, in the study's order."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            raise ConfigError(f"--only {pattern}: no cell of {study} has such a name")
    return [cell for cell in cells if any(fnmatch.fnmatch(cell.name, w) for w in wanted)]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 when a cell or a page failed; 2 for a wrong study; 130 when interrupted."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    # A shell starts background jobs with SIGINT ignored; whoever sends it means it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    failures: list[str] = []
    interrupted = False
    try:
        study = load_study(arguments.study)
        if arguments.fix:
            print(f"fixed: {decision.fix(study)}")
            return 0
        out = arguments.out or Path("lab/experiments") / study.name
        runner = Runner(study, out, arguments.runs or Path("runs") / study.name, arguments.jobs)
        cells = _chosen(list(study.cells()), arguments.only or "*", arguments.study)
        states = {cell: runner.state(cell) for cell in cells}
        if arguments.list:
            print(listing(states, out))
            return 0
        if arguments.verdict:
            found = {cell.name: run for cell, run in finished_runs(runner).items()}
            print("\n".join(decision.report(study, found)))
            return 0
        if not arguments.table:
            print(overview(list(states.values())))
            failures, interrupted = _run(runner, [c for c in cells if states[c] is not State.DONE])
    except ConfigError as error:
        print(f"lab.study: {error}", file=sys.stderr)
        return 2
    finished = report_results(runner)
    if not interrupted:
        failures += write_pages(runner, finished, {cell.regime for cell in cells})
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if interrupted:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 1 if failures else 0


def _run(runner: Runner, cells: list[Cell]) -> tuple[list[str], bool]:
    """The failures of `run_cells`, and whether the user interrupted it."""
    try:
        with best_effort_output():
            return run_cells(runner, cells), False
    except CellError as error:
        return [str(error)], False
    except KeyboardInterrupt:
        return [], True


def listing(states: dict[Cell, State], out: Path) -> str:
    """The lines of ``--list``: each cell and what is left of it."""
    done = [*states.values()].count(State.DONE)
    lines = [f"{state.value:15}{cell.name}" for cell, state in states.items()]
    return "\n".join([*lines, f"{done} of {len(states)} done; results: {out}"])


def finished_runs(runner: Runner) -> dict[Cell, dict[str, Any]]:
    """Every cell that has a result: its own file, or its line in the record."""
    found = {cell: runner.result(cell) or runner.recorded(cell) for cell in runner.study.cells()}
    return {cell: run for cell, run in found.items() if run is not None}


def report_results(runner: Runner) -> list[Cell]:
    """Write the tables of all finished cells of the study, whatever ``--only`` chose; the cells."""
    finished = finished_runs(runner)
    if not finished:
        print(f"no finished run in {runner.out / 'cells'} yet")
        return []
    older = sum(runner.result(cell) is None for cell in finished)
    if older:
        print(f"{older} of {len(finished)} runs are of {study_results.RECORD}, made with other "
              "settings or by an earlier version")  # fmt: skip
    write_tables(runner.study, finished, runner.out)
    print(f"tables and picture: {runner.out}/results.md, results.json, differences.png")
    return list(finished)
