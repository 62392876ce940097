"""The `config.yaml` of the training run that a model's folder is a checkpoint of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.yaml"


@dataclass(frozen=True)
class TrainingRun:
    """A training run; `settings` is the content of `config`, its `config.yaml`."""

    config: Path
    settings: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value of a dotted key; None if it is not set."""
        found: Any = self.settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def base(self) -> str:
        """The model that training started from; empty if the run does not say."""
        return str(self.get("actor.model_name_or_path") or "")

    @property
    def data(self) -> list[str]:
        """The parts of `data.prompt_dataset`."""
        parts = str(self.get("data.prompt_dataset") or "").split(",")
        return [part.strip() for part in parts if part.strip()]


def read(config: Path) -> TrainingRun:
    """The run of a `config.yaml`; without settings if it cannot be read."""
    import yaml

    try:
        found = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    return TrainingRun(config, found if isinstance(found, dict) else {})


def run_of(model: str | Path) -> TrainingRun | None:
    """The run that a model's folder is a checkpoint of; None for any other model."""
    folder = Path(model)
    for checkpoints in folder.resolve().parents if folder.is_dir() else ():
        config = checkpoints.parent / CONFIG
        if checkpoints.name == "checkpoints" and config.is_file():
            return read(config)
    return None
