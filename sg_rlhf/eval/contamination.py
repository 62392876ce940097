"""Contamination: published findings, and the overlap with the model's own training data.

The training data of a run's checkpoint is named in the run's `config.yaml`. For other models
`--train-data` names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.records import DataError, json_objects, parquet_rows, read_each
from sg_rlhf.data_io.run_config import TrainingRun
from sg_rlhf.tasks.contamination import ModelFamily, family_of
from sg_rlhf.tasks.overlap import OverlapReport, Problem, Text, find_overlap
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Suite


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


def family(model: str, run: TrainingRun | None) -> ModelFamily | None:
    """The family of a model, by its name or by that of the model that its run started from."""
    return family_of([model, *([run.base] if run else [])])


def find_training_overlap(
    suite: Suite,
    loaded: Sequence[Benchmark],
    model: str,
    run: TrainingRun | None,
    given: Sequence[Path] | None,
) -> TrainingOverlap:
    """Find the model's family and the overlap of its training data with the questions.

    Args:
        run: that the model is from.
        given: files of `--train-data`; None: those of the run.
    """
    of = family(model, run)
    try:
        if given is not None:
            source, paths = "--train-data", list(given)
        elif run is not None and run.data:
            source, paths = str(run.config), [_find(part, run) for part in run.data]
        else:
            return TrainingOverlap(of)
        read = [_problems(suite, path) for path in paths]
    except (ValueError, OSError) as error:
        if given is not None:
            raise EvalError(f"--train-data {error}") from None
        assert run is not None
        problem = f"the data of {run.config} is not compared: {error}"
        return TrainingOverlap(of, {"problem": problem})
    files = [
        {"name": str(path), "sha256": sha256_of(path), "rows": len(problems)}
        for path, problems in zip(paths, read, strict=True)
    ]
    sets = {each.name: list(each.questions) for each in loaded}
    found = find_overlap([p for part in read for p in part], sets, n=suite.shared_runs)
    return TrainingOverlap(
        of, {"source": source, "files": files}, {overlap.name: overlap for overlap in found}
    )


def exposure_of(seen: TrainingOverlap, benchmark: Benchmark, suite: Suite) -> dict[str, Any]:
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
        # The same text, or most of its runs of words.
        facts["ids"] = sorted(m.test.id for m in overlap.matches if "mostly" in m.levels)
        found["train_overlap"] = facts
    return found


def _problems(suite: Suite, path: Path) -> Sequence[Problem]:
    """The problems of a file that was trained on, as `Question.problem` has them."""
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


def _find(part: str, run: TrainingRun) -> Path:
    """The file that a run names, relative to this folder or to a folder above the run."""
    name = part.partition("@")[0]
    for folder in (Path(), *run.config.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{part}: no such file")
