"""What a model may have seen of the questions: what is published, and its own training data.

A checkpoint of a run names its run's data: `config.yaml` stands above `checkpoints/`. Other models'
data is given with `--train-data`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.eval import trained
from sg_rlhf.eval.model import Model
from sg_rlhf.tasks.contamination import Family, family_of
from sg_rlhf.tasks.overlap import Problem, SetOverlap, find_overlap
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Benchmark, Loaded, Suite


@dataclass(frozen=True)
class TrainedRun:
    """The run that a checkpoint is from.

    Attributes:
        config: its settings as they were resolved.
        base: the model that it began with.
        data: the parts of `data.prompt_dataset`.
    """

    config: Path
    base: str
    data: tuple[str, ...]


@dataclass(frozen=True)
class TrainingData:
    """What was trained on.

    Attributes:
        source: the option or the run that names it.
        files: name, SHA-256 and rows of each file.
    """

    source: str
    files: Sequence[Mapping[str, Any]]
    problems: Sequence[Problem]


@dataclass(frozen=True)
class Seen:
    """Everything of one evaluation.

    Attributes:
        family: of the model; None: not known.
        data: None: it is not known what was trained on.
        overlap: benchmark -> what its questions share with the data.
        problem: why the overlap was not counted, though there is data.
    """

    family: Family | None = None
    data: TrainingData | None = None
    overlap: Mapping[str, SetOverlap] = field(default_factory=dict)
    problem: str | None = None

    def as_dict(self) -> dict[str, Any] | None:
        """The training data, for JSON; None where it is not known."""
        if self.data is None:
            return None if self.problem is None else {"problem": self.problem}
        return {"source": self.data.source, "files": list(self.data.files)}


def run_of(model: Model) -> TrainedRun | None:
    """The run whose checkpoint a folder is; None for any other model."""
    folder = Path(model.location)
    if model.revision is not None or not folder.is_dir():
        return None
    run_dir = trained.run_of(folder)
    settings = {} if run_dir is None else trained.settings_of(run_dir)
    base = trained.setting(settings, "actor.model_name_or_path")
    if run_dir is None or base is None:
        return None
    data = str(trained.setting(settings, "data.prompt_dataset") or "")
    parts = (part.strip() for part in data.split(","))
    return TrainedRun(run_dir / trained.CONFIG, str(base), tuple(filter(None, parts)))


def look(
    suite: Suite, loaded: Sequence[Loaded], model: Model, given: Sequence[Path] | None
) -> Seen:
    """Find the model's family and what its training data shares with the questions.

    Args:
        given: files of `--train-data`; None: those of the model's run, if it is from one.

    Raises:
        EvalError: a given file cannot be read. Those of a run may be gone, which is noted.
    """
    run = run_of(model)
    family = family_of([model.name, *([run.base] if run else [])])
    if given is None and (run is None or not run.data):
        return Seen(family)
    try:
        data = _read(suite, given, run)
    except (ValueError, OSError) as error:
        if given is not None:
            raise EvalError(f"--train-data {error}") from None
        assert run is not None
        return Seen(family, problem=f"the data of {run.config} is not compared: {error}")
    sets = {each.benchmark.name: each.questions for each in loaded}
    found = find_overlap(data.problems, sets, n=suite.shared_runs)
    return Seen(family, data, {overlap.name: overlap for overlap in found})


def described(seen: Seen, benchmark: Benchmark, suite: Suite) -> dict[str, Any]:
    """What `results.json` says of one benchmark."""
    found: dict[str, Any] = {}
    if benchmark.exposure is not None:
        found["contamination"] = benchmark.exposure.about(seen.family)
    overlap = seen.overlap.get(benchmark.name)
    if overlap is not None:
        facts: dict[str, Any] = {"problems": overlap.problems, "exact": overlap.exact}
        if suite.shared_runs is not None:
            facts |= {"mostly": overlap.mostly, "some": overlap.shared, "run": suite.shared_runs}
        facts["ids"] = same(overlap)
        found["train_overlap"] = facts
    return found


def same(overlap: SetOverlap) -> list[str]:
    """Questions that are in the training data: the same text, or most of its runs of words."""
    return sorted(match.test.id for match in overlap.matches if "mostly" in match.levels)


def _read(suite: Suite, given: Sequence[Path] | None, run: TrainedRun | None) -> TrainingData:
    if given is not None:
        paths, source = list(given), "--train-data"
    else:
        assert run is not None
        paths, source = [_find(part, run) for part in run.data], str(run.config)
    files: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for path in paths:
        read = suite.training_problems(path)
        problems += read
        files.append({"name": str(path), "sha256": sha256_of(path), "rows": len(read)})
    return TrainingData(source, files, problems)


def _find(part: str, run: TrainedRun) -> Path:
    """A file as the run named it: from here, or from a folder above the run."""
    name = re.sub(r"@.*$", "", part)
    for folder in (Path(), *run.config.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{part}: no such file")
