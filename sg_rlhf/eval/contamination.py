"""Contamination: published findings, and the overlap with the model's own training data.

The training data of a run's checkpoint is named in the run's `config.yaml`. For other models
`--train-data` names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.records import DataError, json_objects, parquet_rows, read_each
from sg_rlhf.eval import training_runs
from sg_rlhf.eval.model import Model
from sg_rlhf.tasks.contamination import ModelFamily, family_of
from sg_rlhf.tasks.overlap import OverlapReport, Problem, Text, find_overlap
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite


@dataclass(frozen=True)
class TrainingRun:
    """The training run of a checkpoint.

    Attributes:
        config: its `config.yaml`.
        base: the model that training started from.
        data: the parts of `data.prompt_dataset`.
    """

    config: Path
    base: str
    data: tuple[str, ...]


@dataclass(frozen=True)
class TrainingOverlap:
    """What a model may have seen of the questions of one evaluation.

    Attributes:
        family: the model's family; None if unknown.
        data: the training data, for JSON: `source` (the option or the run that names it) and
            `files` (name, SHA-256 and rows of each), or the `problem` because of which it was not
            compared; None if unknown.
        overlap: benchmark -> what its questions share with the data.
    """

    family: ModelFamily | None = None
    data: Mapping[str, Any] | None = None
    overlap: Mapping[str, OverlapReport] = field(default_factory=dict)


def training_run_of(model: Model) -> TrainingRun | None:
    """The training run of a model; None if its folder is not a run's checkpoint."""
    folder = Path(model.location)
    if model.revision is not None or not folder.is_dir():
        return None
    run_dir = training_runs.run_dir_of(folder)
    settings = {} if run_dir is None else training_runs.settings_of(run_dir)
    base = training_runs.setting(settings, "actor.model_name_or_path")
    if run_dir is None or base is None:
        return None
    data = str(training_runs.setting(settings, "data.prompt_dataset") or "")
    parts = (part.strip() for part in data.split(","))
    return TrainingRun(run_dir / training_runs.CONFIG, str(base), tuple(filter(None, parts)))


def find_training_overlap(
    suite: Suite, loaded: Sequence[Benchmark], model: Model, given: Sequence[Path] | None
) -> TrainingOverlap:
    """Find the model's family and the overlap of its training data with the questions.

    Args:
        given: files of `--train-data`; None: those of the model's run, if it is from one.
    """
    run = training_run_of(model)
    family = family_of([model.name, *([run.base] if run else [])])
    if given is not None:
        try:
            data, problems = _read(suite, "--train-data", given)
        except (ValueError, OSError) as error:
            raise EvalError(f"--train-data {error}") from None
    elif run is not None and run.data:
        try:
            data, problems = _read(suite, str(run.config), [_find(part, run) for part in run.data])
        except (ValueError, OSError) as error:
            problem = f"the data of {run.config} is not compared: {error}"
            return TrainingOverlap(family, {"problem": problem})
    else:
        return TrainingOverlap(family)
    sets = {each.name: list(each.questions) for each in loaded}
    found = find_overlap(problems, sets, n=suite.shared_runs)
    return TrainingOverlap(family, data, {overlap.name: overlap for overlap in found})


def overlap_report(seen: TrainingOverlap, benchmark: Benchmark, suite: Suite) -> dict[str, Any]:
    """The entries of `results.json` for one benchmark."""
    found: dict[str, Any] = {}
    if benchmark.exposure is not None:
        found["contamination"] = benchmark.exposure.assess(seen.family)
    overlap = seen.overlap.get(benchmark.name)
    if overlap is not None:
        facts: dict[str, Any] = {"problems": overlap.problems, "exact": overlap.count("exact")}
        if suite.shared_runs is not None:
            facts |= {"mostly": overlap.count("mostly"), "some": overlap.count("any")}
            facts["run"] = suite.shared_runs
        facts["ids"] = near_duplicates(overlap)
        found["train_overlap"] = facts
    return found


def near_duplicates(overlap: OverlapReport) -> list[str]:
    """Ids of questions in the training data: the same text, or most of its n-grams."""
    return sorted(match.test.id for match in overlap.matches if "mostly" in match.levels)


def training_problems(suite: Suite, path: Path) -> Sequence[Problem]:
    """The problems of a file that was trained on, as `Question.problem` has them.

    Raises:
        ValueError: the file cannot be read; names it.
    """
    if suite.training_problems is not None:
        return suite.training_problems(path)

    def problem_of(row: Mapping[str, Any], number: int) -> Text:
        text = row.get(suite.training_field)
        if isinstance(text, list) and text and isinstance(text[-1], dict):
            text = text[-1].get("content")  # as `Question.problem` has it
        if not isinstance(text, str):
            raise DataError(f"{suite.training_field}: {truncate(text)}, expected text")
        return Text(f"row {number}", text)

    rows = parquet_rows(path) if path.suffix == ".parquet" else json_objects(path)
    return read_each(path, rows, problem_of, "row")


def _read(suite: Suite, source: str, paths: Sequence[Path]) -> tuple[dict[str, Any], list[Problem]]:
    """`TrainingOverlap.data`, and the problems of the files."""
    files: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for path in paths:
        read = training_problems(suite, path)
        problems += read
        files.append({"name": str(path), "sha256": sha256_of(path), "rows": len(read)})
    return {"source": source, "files": files}, problems


def _find(part: str, run: TrainingRun) -> Path:
    """The file that a run names, relative to this folder or to a folder above the run."""
    name = re.sub(r"@.*$", "", part)
    for folder in (Path(), *run.config.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{part}: no such file")
