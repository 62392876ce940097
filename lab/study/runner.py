"""Trains and measures the cells of a study: what is there already, processes, devices."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lab.study import results as study_results
from lab.study.plan import DATA, Cell, Study, overrides
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.config import ConfigError
from sg_rlhf.data_io import strict_json
from sg_rlhf.machine.gpus import visible_devices
from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete

LAB = Path(__file__).parents[1]
#: What a run's result depends on. A study's results and pages beside its code do not count.
CODE = ("sg_rlhf", "configs", "lab/*.py", "lab/*.yaml")


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
    #: It was trained or measured with settings other than the study's, and no checkpoint is left.
    TO_TRAIN_AGAIN = "to train again"


class CellError(RuntimeError):
    """A cell did not finish; the message names its log."""


def _named_after(measurement: str, settings: BaseModel) -> str:
    """The file of a measurement with these settings: one that is there is not taken again."""
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    return f"{measurement}-{digest}.json"


def commit() -> str | None:
    """The checkout's commit, with a + if code or a recipe differs from it; None without."""
    git = ["git", "-C", str(LAB.parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *CODE])
    return head.stdout.strip() + "+" * (changed.returncode != 0) if head.returncode == 0 else None


class Runner:
    """Trains and measures cells; ``stop`` ends what runs."""

    def __init__(self, study: Study, out: Path, runs: Path, jobs: int | None) -> None:
        self.study, self.out, self.runs = study, out, runs.resolve()
        self.jobs = jobs
        self._record = study_results.read_record(out)
        self._devices: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._starting = threading.Lock()
        self._sampling = threading.Lock()
        self._stopped = False
        # Once a cell: each reads recipes, and a cell's is asked for several times.
        self._fingerprint = functools.cache(study.fingerprint)

    def take_devices(self) -> int:
        """Divide the visible GPUs among the runs; how many run at a time."""
        found = device_groups(visible_devices(), self.study.file.gpus)
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
        """The cell's file or its line in the record, if it was trained with today's settings."""
        found = study_results.read_cell(self.out / "cells" / cell.file_name)
        for run in (found, self.recorded(cell)):
            if run is not None and run.get("fingerprint") == self._fingerprint(cell):
                return run
        return None

    def recorded(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's line in ``results.jsonl.gz``, whatever it was trained with."""
        return self._record.get(cell.name)

    def run_dir(self, cell: Cell) -> Path:
        """Where a cell trains. Other settings are another run: it must not resume from these."""
        return self.runs / f"{cell.name}-{self._fingerprint(cell)[:8]}"

    def state(self, cell: Cell) -> State:
        """What is left to do for a cell."""
        if self.result(cell) is not None:
            return State.DONE
        if final_checkpoint_complete(self.run_dir(cell)):
            return State.TO_MEASURE
        known = self._trained(cell) or self.recorded(cell)
        return State.TO_TRAIN if known is None else State.TO_TRAIN_AGAIN

    def make_data(self) -> None:
        """The study's data sets, unless they are there."""
        for name, arguments in self.study.file.data.items():
            log = self.data / f"{name}.log"
            folder = self.data / name
            command = ["-m", "sg_rlhf", "data", self.study.file.domain, "--out", str(folder)]
            options = [] if arguments.startswith("--") else ["--generate"]
            self._run([*command, *options, *arguments.split()], log, None)

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train and measure one cell and write its file."""
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
        command = ["-m", self.study.file.trainer, *configs, "--run-dir", str(run_dir)]
        if not final_checkpoint_complete(run_dir):
            self._run([*command, *overrides(settings, self.data)], log, device)
        sharpness = self._sharpness(run_dir, log, device)
        accuracy = self._accuracy(run_dir, log, device)
        found = {
            "cell": cell.name,
            "fingerprint": self._fingerprint(cell),
            "measured_with": self.study.measurements(),
            "commit": commit(),
            **study_results.collect(run_dir, sharpness, accuracy, self.study.file.metrics),
        }
        write_whole(self.out / "cells" / cell.file_name, strict_json.dumps(found) + "\n")
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
                first = self._value("actor.model_name_or_path")
                self._run(self.sharpness_arguments(first, batch, start), log, device)
        if not result.exists():
            last = final_checkpoint(run_dir)
            self._run(self.sharpness_arguments(last, batch, result), log, device)
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
            self._run(["-m", "lab.measure.accuracy", *arguments], log, device)
        measured: dict[str, Any] = json.loads(result.read_text())
        return {"samples": measured["samples"], "sets": measured["models"][0]["sets"]}

    def accuracy_arguments(self, model: str | Path, result: Path) -> list[str]:
        """The arguments of ``python -m lab.measure.accuracy`` for one checkpoint."""
        settings = self.study.file.accuracy
        assert settings is not None
        files = [f"{k}={v.replace(DATA, str(self.data))}" for k, v in settings.sets.items()]
        return [
            "--model", str(model), "--data", *files, "--reward", self._value("reward.remote_url"),
            "--json", str(result), *settings.arguments.split(),
        ]  # fmt: skip

    def _value(self, key: str) -> str:
        return str(self.study.config(next(self.study.cells()), self.data).value(key))

    def sharpness_arguments(self, model: str | Path, batch: Path, result: Path) -> list[str]:
        """The arguments of ``python`` that measure the sharpness of one checkpoint."""
        settings = self.study.file.sharpness
        assert settings is not None
        return [
            "-m", "lab.measure.sharpness", "--model", str(model),
            "--reward", self._value("reward.remote_url"), "--batch", str(batch),
            "--data", settings.data.replace(DATA, str(self.data)), "--rho", *map(str, settings.rho),
            "--json", str(result), *settings.arguments.split(),
        ]  # fmt: skip

    def _run(self, arguments: list[str], log: Path, device: str | None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        # A cell has a Ray cluster of its own, also inside a job of another one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        # For the reward of a study: `module:experiments.NAME.reward`.
        paths = [environment.get("PYTHONPATH"), str(LAB)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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
