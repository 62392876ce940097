"""Run directories as the report reads them: rows, settings, and which runs belong together."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sg_rlhf.common.redaction import redact
from sg_rlhf.config import Config, ConfigError, domain_settings, load_config
from sg_rlhf.report.text import one_line
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint_complete

#: Runs that differ in nothing else are seeds of one experiment: the seed, where files go, and the
#: names that loggers give it.
NOT_COMPARED = (
    "train.seed", "sg.run_dir", "sg.wandb", "sg.verbose", "ckpt.path", "ckpt.output_dir",
    "logger.tensorboard_dir", "logger.wandb.run_name", "logger.wandb.group", "logger.wandb.key",
)  # fmt: skip
SEED = "train.seed"
#: The resolved recipe, which training writes before its first rollout.
CONFIG = "config.yaml"
#: Keys of environment.json that are compared as versions are.
PLATFORM = ("python", "system")
#: Of a sample, a number for each of its tokens; samples of earlier versions have none.
TOKEN_NUMBERS = ("engine_log_probs", "update_log_probs", "entropies")

Row = dict[str, Any]
#: (x, y) in the order of x.
Curve = list[tuple[float, float]]


class RunError(ValueError):
    """A run directory cannot be read; one line for the user."""


@dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        settings: the resolved configuration, dotted keys; empty without a readable config.yaml.
        config: the same as a checked recipe; None where this version does not take it.
        notes: what the reader of the page must know about these files, a sentence each.
    """

    path: Path
    name: str
    metrics: list[Row]
    steps: list[Row]
    samples: list[Row]
    evaluations: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    config: Config | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    planned: int | None = None
    finished: bool = False
    notes: tuple[str, ...] = ()

    def setting(self, key: str) -> Any:
        """The value of a dotted key, upstream's default where the run does not set it."""
        if self.config is not None:
            of_domain = domain_settings.parse_key(key)
            if of_domain is not None and of_domain[0] not in self.config.sg.domains:
                return None
            try:
                return self.config.value(key)
            except (KeyError, AttributeError):
                pass
        return self.settings.get(key)

    @property
    def seed(self) -> str:
        return str(self.setting(SEED) if self.setting(SEED) is not None else "?")

    @property
    def rollouts(self) -> int:
        return int(self.metrics[-1]["global_step"]) if self.metrics else 0


@dataclass(frozen=True)
class Group:
    """Runs of one configuration: the seeds of an experiment."""

    name: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        if len(self.runs) == 1:
            return self.name
        distinct = len({run.seed for run in self.runs}) == len(self.runs)
        return f"{self.name} ({len(self.runs)} {'seeds' if distinct else 'runs'})"


def number(row: Row, key: str) -> float:
    """The value of ``key``, NaN where it is absent or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def curve(rows: Iterable[Row], key: str, x: str = "global_step") -> Curve:
    """(x, value) of the rows that have both."""
    points = ((number(row, x), number(row, key)) for row in rows)
    return [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]


def per_rollout(rows: Iterable[Row], key: str) -> Curve:
    """The mean of a per-optimizer-step value over the steps of each rollout."""
    by_step: dict[float, list[float]] = {}
    for step, value in curve(rows, key):
        by_step.setdefault(step, []).append(value)
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(by_step.items())]


def read_run(path: Path, *, may_be_empty: bool = False) -> Run:
    """Read a run directory; a run that is still training, or was killed, is one too.

    Args:
        may_be_empty: accept a run that has its settings, but no rollout yet.

    Raises:
        RunError: it is not a run, or has no rollout yet, or cannot be read.
    """
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise RunError(f"{path}: {what}; give the directory of a run (train's --run-dir)")
    begun = may_be_empty and (path / CONFIG).exists()
    if not (path / jsonl_log.METRICS).exists() and not begun:
        raise RunError(
            f"{path}: not a run: no {jsonl_log.METRICS} in it (train's --run-dir has one)"
        )
    notes: list[str] = []
    rows = {name: _rows(path, name, notes) for name in jsonl_log.STEP_FILES}
    metrics = _last_of_each_step(rows[jsonl_log.METRICS])
    if not metrics and not may_be_empty:
        if jsonl_log.damaged(path / jsonl_log.METRICS):
            raise RunError(f"{path / jsonl_log.METRICS}: no line can be read")
        raise RunError(f"{path}: no rollout in {jsonl_log.METRICS} yet; wait for the first one")
    settings, config = _settings(path, notes)
    return Run(
        path=path,
        name=one_line(path.resolve().name) or "run",
        metrics=metrics,
        steps=rows[jsonl_log.OPTIMIZER_STEPS],
        samples=[_checked(row) for row in rows[jsonl_log.SAMPLES]],
        evaluations=_last_of_each_step(rows[jsonl_log.EVALUATIONS]),
        settings=settings,
        config=config,
        environment=json_object(path / "environment.json"),
        planned=json_object(path / "plan.json").get("rollouts"),
        finished=final_checkpoint_complete(path),
        notes=tuple(notes),
    )


def _rows(run_dir: Path, name: str, notes: list[str]) -> list[Row]:
    path = run_dir / name
    try:
        rows: list[Any] = jsonl_log.read(path)
        damaged = jsonl_log.damaged(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    for index, row in enumerate(rows):
        if not math.isfinite(number(row, "global_step")):
            raise RunError(f"{path}, line {index + 1}: not a row with a global_step")
    if damaged == [len(rows) + 1]:
        notes.append(f"The last line of {name} is cut short and left out.")
    elif damaged:
        are = "line is" if len(damaged) == 1 else "lines are"
        notes.append(f"{name} has damage in line {damaged[0]}: {len(damaged)} {are} left out.")
    return rows


def _last_of_each_step(rows: list[Row]) -> list[Row]:
    """One row per rollout: a resumed run may have evaluated a step again."""
    return [row for _, row in sorted({row["global_step"]: row for row in rows}.items())]


def _checked(row: Row) -> Row:
    """A sample with every text a string and every list usable, whatever wrote the file."""
    tokens, log_probs = row.get("tokens"), row.get("log_probs")
    count = len(tokens) if isinstance(tokens, list) else -1
    usable = _numbers(log_probs, count)
    texts = {
        key: row[key] if isinstance(row.get(key), str) else json.dumps(row.get(key, ""))
        for key in ("prompt", "label", "response")
    }
    dialogue = row.get("dialogue")
    return {
        **row,
        **texts,
        "dialogue": dialogue if isinstance(dialogue, str) else "",
        "tokens": [str(token) for token in tokens or []] if usable else [],
        "log_probs": log_probs if usable else [],
        **{
            name: row[name] if usable and _numbers(row.get(name), count) else None
            for name in TOKEN_NUMBERS
        },
        "environment": _texts_between(row.get("environment")),
        "group_rewards": row["group_rewards"] if _numbers(row.get("group_rewards")) else None,
    }


def _numbers(values: Any, count: int | None = None) -> bool:
    """Whether this is a list of numbers, ``count`` of them if it is given."""
    return (
        isinstance(values, list)
        and count in (None, len(values))
        and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    )


def _texts_between(pairs: Any) -> list[tuple[int, str]]:
    """[number of tokens before it, text], as training writes it."""
    if not isinstance(pairs, list):
        return []
    usable = (p for p in pairs if isinstance(p, list) and len(p) == 2 and isinstance(p[0], int))
    return [(before, str(text)) for before, text in usable]


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _settings(run_dir: Path, notes: list[str]) -> tuple[dict[str, Any], Config | None]:
    path = run_dir / CONFIG
    if not path.is_file():
        notes.append("There is no config.yaml: token weights and differences are not known.")
        return {}, None
    try:
        found = flatten(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
        settings = {key: redact(key, value) for key, value in found.items()}
    except (OmegaConfBaseException, YAMLError, OSError, ValueError):
        notes.append("config.yaml cannot be read: token weights and differences are not known.")
        return {}, None
    try:
        return settings, load_config(path)
    except ConfigError as error:
        notes.append(
            f"This version does not take the run's config.yaml, so its token weights are not "
            f"shown: {str(error).removeprefix(f'{path.resolve()}: ')}"
        )
        return settings, None


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def grouped(runs: list[Run]) -> list[Group]:
    """Runs whose configuration is the same apart from ``NOT_COMPARED``, in the order given."""
    keys = sorted({key for run in runs for key in run.settings} - set(NOT_COMPARED))
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        same = json.dumps([run.setting(key) for key in keys], default=str)
        # Nothing is known about a run without settings, so it stands alone.
        groups.setdefault(same if run.settings else run.path, []).append(run)
    names = [_common_name([run.name for run in members]) for members in groups.values()]
    return [
        Group(f"{name} [{names[:i].count(name) + 1}]" if names.count(name) > 1 else name, tuple(g))
        for i, (name, g) in enumerate(zip(names, groups.values(), strict=True))
    ]


def _common_name(names: list[str]) -> str:
    """What the names begin with, up to a ``/``, ``_``, ``-``, ``.`` or space; else the first."""
    common = os.path.commonprefix(names)  # noqa: RUF071  (names, not paths)
    if common not in names:
        common = re.sub(r"[/_. -]*[^/_. -]*$", "", common)
    return common or names[0]


def named_apart(runs: list[Run]) -> list[Run]:
    """The runs, each named by its path below the folder that holds all of them."""
    paths = [run.path.resolve() for run in runs]
    base = os.path.commonpath([path.parent for path in paths])
    return [
        replace(run, name=one_line(str(path.relative_to(base))) or "run")
        for run, path in zip(runs, paths, strict=True)
    ]


def differences(groups: list[Group]) -> list[tuple[str, list[str]]]:
    """(key, value in each group) of every setting and package version that is not everywhere the
    same."""
    found = []
    first = [group.runs[0] for group in groups]
    for key in sorted({key for run in first for key in run.settings} - set(NOT_COMPARED)):
        values = [_shown(key, run.setting(key)) if run.settings else "?" for run in first]
        if key.startswith("sg.weighting."):  # a run without token weights reads none of them
            values = [
                v if key in run.settings else "-" for run, v in zip(first, values, strict=True)
            ]
        if len(set(values) - {"-"}) > 1:
            found.append((key, values))
    versions = [_versions(run) for run in first]
    packages = sorted({name for found in versions for name in found} - {*PLATFORM})
    for name in (*PLATFORM, *packages):
        values = [_shown(name, found.get(name)) for found in versions]
        if len(set(values)) > 1:
            found.append((f"version of {name}", values))
    return found


def _versions(run: Run) -> dict[str, Any]:
    packages = run.environment.get("versions")
    platform = {name: run.environment.get(name) for name in PLATFORM}
    return {**(packages if isinstance(packages, dict) else {}), **platform}


def _shown(key: str, value: Any) -> str:
    return "not set" if value is None else one_line(str(redact(key, value)))


def all_settings(run: Run) -> list[tuple[str, str]]:
    return [(one_line(key), _shown(key, value)) for key, value in sorted(run.settings.items())]
