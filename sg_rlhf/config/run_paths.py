"""Paths of a run: its run directory, what is written there, and inputs as absolute paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sg_rlhf.config import builtin_recipes
from sg_rlhf.config.checks import input_files
from sg_rlhf.config.checks.files import WRITTEN_TO
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.recipe import Config, local_path
from sg_rlhf.run_dir.final_model import final_checkpoint

_DATA_FILES = {".json", ".jsonl", ".parquet", ".csv"}


def run_dir_of(requested: str | None, files: Sequence[str], config: Config) -> Path:
    """The run directory: ``--run-dir``, else ``runs/<domain>_<recipe>``.

    Args:
        requested: ``--run-dir``. An address is refused: it would become a folder of that name.
        files: the recipe's parts.
        config: the recipe. Without a shipped domain the parts alone give the name.
    """
    if requested and "://" in requested:
        raise ConfigError(
            f"--run-dir {requested}: expected a folder; mount it on every machine of the run "
            "(a shared file system, or the bucket by mountpoint-s3, gcsfuse or rclone) and give "
            "its path"
        )
    names = [
        *(d.name for d in input_files.domains_of(config)[:1]),
        *map(builtin_recipes.short_name, files),
    ]
    return Path(requested or Path("runs") / ("_".join(names) or "run"))


def with_run_dir(config: Config, run_dir: Path) -> Config:
    """Set the paths inside the run directory that the recipe does not set itself."""
    derived = {
        "ckpt.path": str(run_dir / "checkpoints" / "deepspeed"),
        "ckpt.output_dir": str(final_checkpoint(run_dir)),
        "logger.tensorboard_dir": str(run_dir / "tensorboard"),
        "logger.wandb.run_name": run_dir.name,
    }
    extra = {key: value for key, value in derived.items() if key not in config.values}
    sg = config.sg.model_copy(update={"run_dir": str(run_dir)})
    return replace(config, values=config.values | extra, sg=sg)


def with_absolute_paths(config: Config) -> Config:
    """The configuration for workers, which may have been started in another folder.

    Only a name that is there, seen from here, is a path; others may be ids of a hub. The run
    directory's ``config.yaml`` keeps them as they were given.
    """
    given = config.values
    absolute: dict[str, Any] = {
        k: _absolute(given[k]) for k in input_files.READ_FROM if given.get(k)
    }
    absolute |= {k: os.path.abspath(given[k]) for k in WRITTEN_TO if given.get(k)}
    sets = [s.model_copy(update={"dataset": _absolute(s.dataset)}) for s in config.sg.eval_sets]
    trusted = [
        _absolute(local_path("sg.trust_remote_code", n)) for n in config.sg.trust_remote_code
    ]
    sg = config.sg.model_copy(update={"eval_sets": sets, "trust_remote_code": trusted})
    return replace(config, values=given | absolute, sg=sg)


def _absolute(names: str) -> str:
    """Upstream's lists have commas between names, and its data sets ``@FOLDER`` behind them."""

    def one(name: str) -> str:
        path, at, folder = name.strip().partition("@")
        found = os.path.abspath(path)
        usable = path and os.path.exists(path) and not {",", "@"} & set(found)
        return found + at + folder if usable else name

    return ",".join(map(one, names.split(",")))


def local_data(config: Config) -> tuple[str, ...]:
    """Local data files of a recipe, training prompts first; other names are ids of the hub."""
    named = [config.value("data.prompt_dataset"), config.value("eval.dataset")]
    named += [one.dataset for one in config.sg.eval_sets]
    names = [name.strip() for given in named for name in str(given or "").split(",")]
    return tuple(dict.fromkeys(name for name in names if Path(name).suffix in _DATA_FILES))
