"""A study: which recipes are trained with which seeds, read from one YAML file.

A cell is one training run: a regime (shared settings), a variant (an algorithm) and a seed. The
plan says which combinations are run and in which order.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sg_rlhf.algo.weightings import weighting_class
from sg_rlhf.config import Config, ConfigError, load_config
from sg_rlhf.config.resume_compatibility import NUMERICS_ONLY
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.tasks import registry

DATA = "{data}"
#: Settings that leave what a run trains as it is: where it writes, and how it is laid out.
WITHOUT_EFFECT = ("sg.run_dir", "ckpt.", "logger.", "ds.packing_samples", *NUMERICS_ONLY)
#: configs/hardware/cpu.yaml sets these since runs were first recorded, and set those then. At
#: upstream's defaults they change no run, so the fingerprint of a recorded run stays what it was.
CPU_SETS_NOW = (
    "actor.gradient_checkpointing_enable", "ds.adam_offload", "ds.enable_sleep",
    "vllm.enable_sleep",
)  # fmt: skip
CPU_SET_ONCE = ("vllm.enable_prefix_caching",)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Regime(_Section):
    about: str = ""
    set: dict[str, Any] = {}


class Variant(Regime):
    recipe: str | None = None


class Sharpness(_Section):
    """Arguments of ``python -m lab.measure.sharpness``; the first cell samples the batch."""

    data: str
    rho: list[float] = Field(min_length=1)
    arguments: str = ""


class Accuracy(_Section):
    """Arguments of ``python -m lab.measure.accuracy`` on each cell's last checkpoint.

    sets: a name and a file each; ``held_out`` and ``train`` give the generalisation gap.
    """

    sets: dict[str, str] = Field(min_length=1)
    arguments: str = ""


class Block(_Section):
    regimes: list[str] = Field(min_length=1)
    variants: list[str] = Field(min_length=1)
    seeds: list[int] | None = None


class EndPoint(_Section):
    """The mean accuracy of an evaluation set after these rollouts."""

    set: str = "held_out"
    rollouts: list[int] = Field(min_length=1)


class Gate(_Section):
    """A figure of a JSON file that must be in a range, or equal to a value.

    at: its keys, with dots between them.
    """

    file: str
    at: str
    least: float = -math.inf
    most: float = math.inf
    equals: Any = None


class Contrasted(_Section):
    """A primary contrast, treated minus baseline, and what each outcome of it means."""

    treated: str
    baseline: str
    better: str
    equivalent: str
    worse: str
    ambiguous: str


class Decision(_Section):
    """The rule of the verdict (``lab.study.decision``).

    groups: name -> regimes; each contrast is taken within each group. control: the arm that must
    differ from another one before equivalence counts. files: what is fixed besides the study file.
    """

    end_point: EndPoint
    margin: float = Field(gt=0)
    alpha: float = Field(0.05, gt=0, lt=1)
    groups: dict[str, list[str]] = Field(min_length=1)
    contrasts: list[Contrasted] = Field(min_length=1)
    control: tuple[str, str]
    gates: list[Gate] = []
    files: list[str] = []

    @property
    def arms(self) -> set[str]:
        """The variants that the verdict compares."""
        compared = {arm for one in self.contrasts for arm in (one.treated, one.baseline)}
        return compared | {*self.control}


class StudyFile(_Section):
    """The keys of a study's file."""

    about: str
    base: str
    baseline: str
    seeds: list[int] = Field(min_length=1)
    trainer: Literal["sg_rlhf.train", "lab.loop"] = "sg_rlhf.train"
    gpus: int = Field(1, ge=1, description="GPUs of one run, where there are any")
    revision: int = Field(
        1, ge=1, description="raised when corrected code would train the same settings differently"
    )
    domain: str = Field("kk", description="whose data command makes the data sets")
    data: dict[str, str] = Field(
        {}, description="name -> KEY=VALUE pairs of --generate, or any arguments that start with --"
    )
    set: dict[str, Any] = {}
    sharpness: Sharpness | None = None
    accuracy: Accuracy | None = None
    metrics: list[str] = Field([], description="columns of metrics.jsonl that a cell keeps")
    decision: Decision | None = None
    regimes: dict[str, Regime] = Field(min_length=1)
    variants: dict[str, Variant] = Field(min_length=1)
    plan: list[Block] = Field(min_length=1)

    @field_validator("domain")
    @classmethod
    def _is_a_domain(cls, name: str) -> str:
        registry.find(name)
        return name

    @model_validator(mode="after")
    def _names_exist(self) -> StudyFile:
        for block in self.plan:
            for kind, names, known in (
                ("regime", block.regimes, self.regimes),
                ("variant", block.variants, self.variants),
            ):
                for name in names:
                    if name not in known:
                        raise ValueError(f"plan: {kind} {name!r}: expected one of {[*known]}")
        if self.trainer == "lab.loop" and (self.sharpness or self.accuracy):
            raise ValueError("trainer: lab.loop keeps no checkpoint for sharpness or accuracy")
        if self.baseline not in self.variants:
            raise ValueError(f"baseline={self.baseline!r}: expected one of {[*self.variants]}")
        if self.decision is not None:
            regimes = {name for group in self.decision.groups.values() for name in group}
            for kind, wanted, there in (
                ("regime", regimes, [*self.regimes]),
                ("variant", self.decision.arms, [*self.variants]),
            ):
                for name in sorted(wanted - {*there}):
                    raise ValueError(f"decision: {kind} {name!r}: expected one of {there}")
        return self


@dataclass(frozen=True)
class Cell:
    """One training run of a study."""

    regime: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.regime}/{self.variant}/s{self.seed}"

    @property
    def file_name(self) -> str:
        return f"{self.name.replace('/', '.')}.json"


@dataclass(frozen=True)
class Study:
    """A checked study. path: its file, which relative recipes are relative to."""

    path: Path
    file: StudyFile

    @property
    def name(self) -> str:
        """The file's name; of ``NAME/study.yaml`` the folder's."""
        return self.path.parent.name if self.path.stem == "study" else self.path.stem

    def cells(self) -> Iterator[Cell]:
        """Every cell once, in the order of the plan: block by block, seed by seed."""
        seen = set()
        for block in self.file.plan:
            seeds = block.seeds or self.file.seeds
            for seed, regime, variant in itertools.product(seeds, block.regimes, block.variants):
                cell = Cell(regime, variant, seed)
                if cell not in seen:
                    seen.add(cell)
                    yield cell

    def recipe(self, cell: Cell) -> tuple[list[Path], dict[str, Any]]:
        """The recipe files of a cell, base first, and its settings on top of them."""
        file = self.file
        variant = file.variants[cell.variant]
        recipes = [file.base, *([variant.recipe] if variant.recipe else [])]
        settings = {**file.set, **file.regimes[cell.regime].set, **variant.set}
        paths = [(self.path.parent / recipe).resolve() for recipe in recipes]
        return paths, {**settings, "train.seed": cell.seed}

    def config(self, cell: Cell, data: Path) -> Config:
        """The resolved recipe of a cell, its data sets in the folder ``data``."""
        paths, settings = self.recipe(cell)
        return load_config(paths, overrides(settings, data))

    def measurements(self) -> dict[str, Any]:
        """How a finished run is measured: the sections of the file, for each cell's own file."""
        sections = {"sharpness": self.file.sharpness, "accuracy": self.file.accuracy}
        found = {name: s.model_dump(mode="json") for name, s in sections.items() if s is not None}
        return {**found, **({"metrics": self.file.metrics} if self.file.metrics else {})}

    def fingerprint(self, cell: Cell) -> str:
        """A hash of everything that decides what the cell trains, but not of where it writes.

        The weights of a start model that is a local folder are part of it. A model of a package
        (``module:NAME``) or of the hub counts by its name.
        """
        config = self.config(cell, Path("data"))
        parts = [_decisive(config), self.file.data, self.file.revision, self.file.domain]
        if self.file.trainer != "sg_rlhf.train":
            parts.append(self.file.trainer)
        start = Path(str(config.value("actor.model_name_or_path")))
        if weights := [*start.glob("*.safetensors"), *start.glob("*.bin")]:
            parts.append({w.name: _sha256_of(w, w.stat().st_mtime_ns) for w in sorted(weights)})
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _sha256_of(path: Path, _mtime_ns: int) -> str:
    """Cached, since all cells of a start model ask for it and a file can have many GB."""
    return sha256_of(path)


def _decisive(config: Config) -> dict[str, Any]:
    """Everything that decides what a recipe trains. A setting at its default is left out, so that
    a setting that comes later does not ask for finished runs again."""
    ours = config.sg.model_dump(mode="json", exclude_defaults=True)
    if weighting := ours.get("weighting"):
        defaults = {f.name: f.default for f in fields(weighting_class(weighting["type"]))}
        changed = {k: v for k, v in weighting.items() if k not in defaults or v != defaults[k]}
        ours["weighting"] = changed
    settings = {**config.values, **{f"sg.{name}": value for name, value in ours.items()}}
    if config.hardware == "cpu":
        for key in CPU_SETS_NOW:
            if config.value(key) == flags()[key].default:
                settings.pop(key, None)
        settings |= {key: config.value(key) for key in CPU_SET_ONCE}
    return {key: v for key, v in settings.items() if not key.startswith(WITHOUT_EFFECT)}


def overrides(settings: dict[str, Any], data: Path) -> list[str]:
    """Settings as ``key=value`` with the data folder filled in; values are JSON, which is YAML."""
    return [
        f"{key}={json.dumps(value)}".replace(DATA, str(data)) for key, value in settings.items()
    ]


def _said(error: ValidationError) -> str:
    """The first error in one line: key, value, what is expected."""
    first = error.errors()[0]
    key, kind, given = ".".join(map(str, first["loc"])), first["type"], first["input"]
    if kind == "missing":
        return f"{key}: not set, and a study needs it"
    if kind == "extra_forbidden":
        known = _keys_beside(first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if kind == "value_error":
        said = first["msg"].removeprefix("Value error, ")
        return f"{key}: {said}" if key else said
    shown = json.dumps(given, default=str)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    expected = first["msg"].replace("Input should be", "expected")
    return f"{key}={shown}: {expected}"


def _keys_beside(place: tuple[int | str, ...]) -> list[str]:
    """The keys that the section of a file has, in which the last one of ``place`` is unknown."""
    sections: dict[str, type[BaseModel]] = {
        "regimes": Regime, "variants": Variant, "sharpness": Sharpness, "accuracy": Accuracy,
        "plan": Block, "decision": Decision,
    }  # fmt: skip
    section = sections.get(str(place[0]), StudyFile) if len(place) > 1 else StudyFile
    return list(section.model_fields)


def load_study(path: Path) -> Study:
    """Read and check a study, each cell's recipe included.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    try:
        tree = yaml.safe_load(path.read_text())
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected a mapping of keys to values")
        study = Study(path.resolve(), StudyFile(**{str(key): tree[key] for key in tree}))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not a YAML mapping: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_said(error)}") from None
    checked: dict[tuple[str, str], Cell] = {}
    for cell in study.cells():  # seeds differ in nothing that could be wrong
        checked.setdefault((cell.regime, cell.variant), cell)
    for cell in checked.values():
        try:
            study.config(cell, Path("data"))
        except ConfigError as error:
            raise ConfigError(f"{path}: cell {cell.name}: {error}") from None
    return study
