"""Run a study: every cell of its plan through the real pipeline, then tables and report pages.

A cell is one training run (regime, variant, seed) with a run directory of its own. A finished cell
leaves a small file under --out and is not run again, on this machine or after a fresh clone, until
a setting that it was trained or measured with changes. Interrupted cells resume from their last
checkpoint. A cell whose measurements alone have changed is measured again where its checkpoint is
still under --runs, and is else trained again: --list says which.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import enum
import fnmatch
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from sg_rlhf.config import ConfigError
from sg_rlhf.final_checkpoint import final_checkpoint, final_checkpoint_complete
from sg_rlhf.lab import study_results, study_tables
from sg_rlhf.lab.study import DATA, Cell, Study, load_study, overrides
from sg_rlhf.tasks.command_line import progress_bar
from sg_rlhf.tasks.whole_file import write_whole

EXAMPLES = """\
examples:
  what would be run, and what is there already
    python -m sg_rlhf.lab.ablation --study configs/lab/kk_small.yaml --list
  the whole study, two runs at a time
    python -m sg_rlhf.lab.ablation --study configs/lab/kk_small.yaml --jobs 2
  one regime of it
    python -m sg_rlhf.lab.ablation --study configs/lab/kk_small.yaml --only 'base/*/s0'
  the tables and pages again, from the cells and the runs that are there
    python -m sg_rlhf.lab.ablation --study configs/lab/kk_small.yaml --table

With GPUs each cell gets as many as the study says, and --jobs defaults to what fits.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, with the teaching help."""
    parser = _Parser(
        prog="python -m sg_rlhf.lab.ablation",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", required=True, type=Path, metavar="FILE", help="the study")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results [bench/results/<study>]")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="run directories and data [runs/<study>]"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time [what the GPUs hold, or 1]"
    )
    parser.add_argument(
        "--only", metavar="PATTERNS", help="cells by name, as in 'base/*' or '*/grpo/s0,base/tau_*'"
    )
    parser.add_argument("--list", action="store_true", help="list the cells and stop")
    parser.add_argument("--table", action="store_true", help="only write tables, pictures, pages")
    arguments = parser.parse_args(argv)
    if arguments.jobs is not None and arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: expected 1 or more")
    return arguments


def devices() -> list[str]:
    """The GPUs that this process may use, by what CUDA_VISIBLE_DEVICES calls them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def device_groups(found: list[str], size: int) -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES, a run's GPUs each.

    Raises:
        ConfigError: there are GPUs, but not as many as a run takes.
    """
    if found and len(found) < size:
        raise ConfigError(f"gpus={size}: a run takes {size} GPUs and {len(found)} are visible")
    return [",".join(found[i : i + size]) for i in range(0, len(found) - size + 1, size)]


class State(enum.Enum):
    """What is left of a cell; the value is how ``--list`` says it."""

    DONE = "done"
    TO_MEASURE = "to measure"
    TO_TRAIN = "to train"
    #: Its file is there, with measurements other than the study's, and its checkpoint is not.
    TO_TRAIN_AGAIN = "to train again"


class CellError(RuntimeError):
    """A cell did not finish; the message names its log."""


def _named_after(measurement: str, settings: BaseModel) -> str:
    """The file of a measurement with these settings: one that is there is not taken again."""
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    return f"{measurement}-{digest}.json"


class Runner:
    """Trains and measures cells; ``stop`` ends what runs."""

    def __init__(self, study: Study, out: Path, runs: Path, jobs: int | None) -> None:
        self.study, self.out, self.runs = study, out, runs.resolve()
        self.jobs = jobs
        self._devices: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._starting = threading.Lock()
        self._sampling = threading.Lock()
        self._stopped = False
        # Once a cell: each reads recipes, and a cell's is asked for several times.
        self._fingerprint = functools.cache(study.fingerprint)

    def take_devices(self) -> int:
        """Divide the visible GPUs among the runs; how many run at a time.

        Raises:
            ConfigError: there are GPUs, but not as many as a run takes.
        """
        found = device_groups(devices(), self.study.file.gpus)
        jobs = self.jobs or max(1, len(found))
        for i in range(jobs):
            self._devices.put(found[i % len(found)] if found else None)
        return jobs

    @property
    def data(self) -> Path:
        return self.runs / "data"

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's file, if it was trained and measured with today's settings."""
        found = self._trained(cell)
        if found is None or found.get("measured_with") != self.study.measurements():
            return None
        return found

    def _trained(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's file, if it was trained with today's settings."""
        found = study_results.read_cell(self.out / "cells" / cell.file_name)
        if found is None or found.get("fingerprint") != self._fingerprint(cell):
            return None
        return found

    def run_dir(self, cell: Cell) -> Path:
        """Where a cell trains. Other settings are another run: it must not resume from these."""
        return self.runs / f"{cell.name}-{self._fingerprint(cell)[:8]}"

    def state(self, cell: Cell) -> State:
        """What is left to do for a cell."""
        if self.result(cell) is not None:
            return State.DONE
        if final_checkpoint_complete(self.run_dir(cell)):
            return State.TO_MEASURE
        return State.TO_TRAIN if self._trained(cell) is None else State.TO_TRAIN_AGAIN

    def make_data(self) -> None:
        """The study's data sets, unless they are there.

        Raises:
            CellError: a data command failed.
        """
        for name, arguments in self.study.file.data.items():
            log = self.data / f"{name}.log"
            folder = self.data / name
            command = ["-m", "sg_rlhf.data", "kk", "--out", str(folder)]
            self._run([*command, "--generate", *arguments.split()], log, None)

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train and measure one cell and write its file.

        Raises:
            CellError: the run failed or was stopped.
        """
        device = self._devices.get()
        try:
            return self._run_on(cell, device)
        finally:
            self._devices.put(device)

    def _run_on(self, cell: Cell, device: str | None) -> dict[str, Any]:
        run_dir = self.run_dir(cell)
        log = run_dir / "terminal.log"
        paths, settings = self.study.recipe(cell)
        configs = [argument for path in paths for argument in ("--config", str(path))]
        command = ["-m", "sg_rlhf.train", *configs, "--run-dir", str(run_dir)]
        if not final_checkpoint_complete(run_dir):
            self._run([*command, *overrides(settings, self.data)], log, device)
        sharpness = self._sharpness(run_dir, log, device)
        accuracy = self._accuracy(run_dir, log, device)
        found = {
            "cell": cell.name,
            "fingerprint": self._fingerprint(cell),
            "measured_with": self.study.measurements(),
            **study_results.collect(run_dir, sharpness, accuracy),
        }
        write_whole(self.out / "cells" / cell.file_name, json.dumps(found, indent=1) + "\n")
        return found

    def _sharpness(self, run_dir: Path, log: Path, device: str | None) -> dict[str, Any] | None:
        settings = self.study.file.sharpness
        if settings is None:
            return None
        name = _named_after("sharpness", settings)
        batch, result = self.runs / f"batch_of_{name}", run_dir / name
        with self._sampling:  # one batch for all cells, from the model that they start from
            if not batch.exists():
                start = self.runs / f"start_of_{name}"
                self._measure(self._value("actor.model_name_or_path"), batch, start, log, device)
        if not result.exists():
            self._measure(final_checkpoint(run_dir), batch, result, log, device)
        measured: dict[str, Any] = json.loads(result.read_text())["models"][0]
        measured.pop("model")
        return measured

    def _accuracy(self, run_dir: Path, log: Path, device: str | None) -> dict[str, Any] | None:
        settings = self.study.file.accuracy
        if settings is None:
            return None
        result = run_dir / _named_after("accuracy", settings)
        if not result.exists():
            arguments = self.accuracy_arguments(final_checkpoint(run_dir), result)
            self._run(["-m", "sg_rlhf.lab.accuracy", *arguments], log, device)
        measured: dict[str, Any] = json.loads(result.read_text())
        return {"samples": measured["samples"], "sets": measured["models"][0]["sets"]}

    def accuracy_arguments(self, model: str | Path, result: Path) -> list[str]:
        """The arguments of ``python -m sg_rlhf.lab.accuracy`` for one checkpoint."""
        settings = self.study.file.accuracy
        assert settings is not None
        files = [f"{k}={v.replace(DATA, str(self.data))}" for k, v in settings.sets.items()]
        return [
            "--model", str(model), "--data", *files, "--reward", self._value("reward.remote_url"),
            "--json", str(result), *settings.arguments.split(),
        ]  # fmt: skip

    def _value(self, key: str) -> str:
        return str(self.study.config(next(self.study.cells()), self.data).value(key))

    def _measure(
        self, model: str | Path, batch: Path, result: Path, log: Path, device: str | None
    ) -> None:
        command = ["-m", "sg_rlhf.lab.sharpness", *self.sharpness_arguments(model, batch, result)]
        self._run(command, log, device)

    def sharpness_arguments(self, model: str | Path, batch: Path, result: Path) -> list[str]:
        """The arguments of ``python -m sg_rlhf.lab.sharpness`` for one checkpoint."""
        settings = self.study.file.sharpness
        assert settings is not None
        return [
            "--model", str(model), "--reward", self._value("reward.remote_url"),
            "--batch", str(batch), "--data", settings.data.replace(DATA, str(self.data)),
            "--rho", *map(str, settings.rho), "--json", str(result), *settings.arguments.split(),
        ]  # fmt: skip

    def _run(self, arguments: list[str], log: Path, device: str | None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        # A cell has a Ray cluster of its own, also inside a job of another one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        with log.open("ab") as output:
            with self._starting:
                if self._stopped:
                    raise CellError("stopped")
                process = subprocess.Popen(
                    [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                )  # fmt: skip
                self._processes.add(process)
            status = process.wait()
            self._processes.discard(process)
        if status:
            raise CellError(f"{arguments[1]} ended with status {status}; see {log}")

    def stop(self) -> None:
        """Interrupt what runs and start nothing more; a run ends its own Ray cluster."""
        with self._starting:
            self._stopped = True
            for process in list(self._processes):
                process.send_signal(signal.SIGINT)


def write_tables(study: Study, runner: Runner) -> list[dict[str, Any]]:
    """results.json, results.md and the pictures of the cells that are there."""
    cells = [(cell, found) for cell in study.cells() if (found := runner.result(cell))]
    rows = study_results.summarize(study, cells)
    if rows:
        pooled = study_results.over_regimes(rows)
        rankings = study_results.beside_published(study, rows)
        content = {
            "study": study.name, "cells": len(cells), "rows": rows, "all_regimes": pooled,
            "published": rankings,
        }  # fmt: skip
        # JSON has no NaN: an interval of one seed is null.
        text = json.dumps(content, indent=1).replace("NaN", "null")
        write_whole(runner.out / "results.json", text + "\n")
        write_whole(runner.out / "results.md", study_tables.table(study, rows, pooled, rankings))
        from sg_rlhf.lab import study_plots  # matplotlib: only where it draws

        study_plots.plot(study, rows, runner.out / "results.png")
        if any("held_out_after_difference" in row for row in rows):
            study_plots.plot_differences(study, rows, runner.out / "differences.png")
    return rows


def write_pages(runner: Runner, regimes: set[str]) -> list[Path]:
    """A report page for each of these regimes, of its finished runs that are still here."""
    from sg_rlhf.report import page  # matplotlib: only where it draws

    run_dirs: dict[str, list[Path]] = {}
    for cell in runner.study.cells():
        if cell.regime in regimes and runner.result(cell) and runner.run_dir(cell).is_dir():
            run_dirs.setdefault(cell.regime, []).append(runner.run_dir(cell))
    written = []
    for regime, found in run_dirs.items():
        path = runner.runs / regime / "report.html"
        write_whole(path, page.build(*page.read_runs(found)))
        written.append(path)
    return written


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
    names = [name for name in ("held_out", "larger") if f"{name}_after" in figures]
    if not names and "eval_after" in figures:
        names = ["eval"]
    accuracy = ", ".join(
        # A set that is only measured at the end has no accuracy before.
        f"{name} "
        + (f"{figures[f'{name}_before']:.3f} -> " if f"{name}_before" in figures else "")
        + f"{figures[f'{name}_after']:.3f}"
        for name in names
    )
    return f"{cell.name}: {accuracy}, largest gradient norm {figures['grad_norm_max']:.3g}"


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
        parts.append("again: measured with other settings, and the checkpoint is not under --runs")
    return "; ".join(parts)


def _chosen(cells: Sequence[Cell], patterns: str, study: Path) -> list[Cell]:
    """The cells whose names match one of the patterns, in the study's order."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            raise ConfigError(f"--only {pattern}: no cell of {study} has such a name")
    return [cell for cell in cells if any(fnmatch.fnmatch(cell.name, w) for w in wanted)]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 when a cell failed; 2 for a wrong study; 130 when interrupted."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    # A shell starts background jobs with SIGINT ignored; whoever sends it means it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        study = load_study(arguments.study)
        out = arguments.out or Path("bench") / "results" / study.name
        runner = Runner(study, out, arguments.runs or Path("runs") / study.name, arguments.jobs)
        cells = _chosen(list(study.cells()), arguments.only or "*", arguments.study)
        states = {cell: runner.state(cell) for cell in cells}
    except ConfigError as error:
        print(f"sg_rlhf.lab.ablation: {error}", file=sys.stderr)
        return 2
    todo = [cell for cell in cells if states[cell] is not State.DONE]
    if arguments.list:
        for cell in cells:
            print(f"{states[cell].value:15}{cell.name}")
        print(f"{len(cells) - len(todo)} of {len(cells)} done; results: {out}")
        return 0
    failures: list[str] = []
    interrupted = False
    if not arguments.table:
        print(overview(list(states.values())))
        try:
            failures = run_cells(runner, todo)
        except ConfigError as error:
            print(f"sg_rlhf.lab.ablation: {error}", file=sys.stderr)
            return 2
        except CellError as error:
            failures = [str(error)]
        except KeyboardInterrupt:
            interrupted = True
    rows = write_tables(study, runner)
    if rows:
        print(f"tables and pictures: {out}/results.md, .json, .png, differences.png")
    else:
        print(f"no finished run in {out / 'cells'} yet")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if interrupted:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    for path in write_pages(runner, {cell.regime for cell in cells}):
        print(f"page of the runs: {path}")
    return 1 if failures else 0


def _interrupt(_signum: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
