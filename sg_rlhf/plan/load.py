"""Read a recipe as a run does: fitted to its hardware, with the paths of its run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sg_rlhf.common.atomic_io import real_path
from sg_rlhf.config import Config, ConfigError, builtin_recipes, load_config
from sg_rlhf.config.checks import input_files
from sg_rlhf.machine.hardware import Hardware, named
from sg_rlhf.plan.of_recipe import Plan, fastest_update, is_full
from sg_rlhf.plan.run_shape import run_shape
from sg_rlhf.run_dir.final_model import final_checkpoint

#: Keys of a hardware's settings that :func:`fitted` chooses, and the part that then sets them.
CHOSEN = (
    "ds.zero_stage", "ds.adam_offload", "actor.gradient_checkpointing_enable",
    "train.micro_batch_size", "rollout.micro_batch_size",
)  # fmt: skip
BY_PLAN = "the plan"
#: Other settings than the hardware's have to take at most this share of their time, and may take
#: so much more for sums of gradients in float32.
FASTER, SLOWER = 0.98, 1.02


def load_run(
    parts: Sequence[str], overrides: Sequence[str] = (), run_dir: str | None = None
) -> Config:
    """The recipe of a run: :func:`load_fitted`, then :func:`with_run_dir`.

    Args:
        parts: files, ``algorithm:NAME`` and ``hardware:NAME``, of which the later wins.
        run_dir: ``--run-dir``; None for :func:`run_dir_of`.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    config = load_fitted(parts, overrides)
    try:
        folder = real_path(run_dir_of(run_dir, parts, config), "--run-dir")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return with_run_dir(config, folder)


def load_fitted(parts: Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """Read a recipe as a run does: :func:`load_config`, then :func:`fitted`."""
    return fitted(load_config(parts, overrides))


def fitted(config: Config) -> Config:
    """A recipe whose trainer has the fastest settings that fit, by the plan of its hardware.

    Only settings that come with a hardware name change (``--hardware``, ``hardware:NAME``). What a
    recipe or an override sets stays. Gradients are summed in float32 where that fits and takes at
    most :data:`SLOWER` longer.

    Raises:
        ConfigError: the model is a module that is not installed.
    """
    try:
        machine = named(config.hardware)
        run = run_shape(config)
    except ValueError:  # no hardware name, or a model of a kind whose memory is not known
        return config
    if run is None or run.cpu or not run.colocated or run.ranks > machine.gpus:
        return config
    fixed = {key for key in CHOSEN if not _is_of_hardware(config.origin.get(key, ""))}
    found = fastest_update(run, machine, fixed=fixed)
    if found is None:
        return config
    best, own = found, Plan(run, machine)
    as_safe = own.memory.fits and not own.memory.tight and is_full(own) <= is_full(found)
    if as_safe and found.seconds > FASTER * own.seconds:
        best = own
    if "ds.grad_accum_dtype" not in config.origin and run.grad_bytes == run.weight_bytes == 2:
        same = None
        if best.run.zero_stage > 1:  # see fastest_update
            same = Plan(replace(best.run, grad_bytes=4), machine)
        other = fastest_update(replace(run, grad_bytes=4), machine, fixed=fixed)
        for summed in (same, other):
            if summed is None or not summed.memory.fits or summed.memory.tight:
                continue
            if is_full(summed) <= is_full(best) and summed.seconds <= SLOWER * best.seconds:
                best = summed
                break
    settings = best.run.settings
    changed = {key: settings[key] for key in CHOSEN if settings[key] != config.value(key)}
    if best.run.grad_bytes > run.grad_bytes:
        changed["ds.grad_accum_dtype"] = "fp32"
    return replace(
        config,
        values=config.values | changed,
        origin=config.origin | dict.fromkeys(changed, BY_PLAN),
        sources=(*config.sources, BY_PLAN) if changed else config.sources,
    )


def _is_of_hardware(part: str) -> bool:
    """Whether a part of a recipe is a hardware's: a name, or a file of configs/hardware."""
    return part.startswith(builtin_recipes.HARDWARE) or Path(part).parent.name == "hardware"


def load_for(
    files: Sequence[str], overrides: Sequence[str], hardware: str | None
) -> tuple[Config, Hardware | None]:
    """A recipe as it would run on named hardware: with its settings on top.

    Raises:
        ConfigError: the recipe is wrong, or there is no such hardware.
    """
    if hardware is None:
        return load_fitted(files, overrides), None
    try:
        machine = named(hardware)
    except ValueError as error:
        raise ConfigError(f"--hardware {error}") from None
    return load_fitted([*files, f"hardware:{hardware}"], overrides), machine


def run_dir_of(requested: str | None, files: Sequence[str], config: Config) -> Path:
    """The run directory: ``--run-dir``, else ``runs/<domain>_<recipe>``.

    An address is refused: it would become a folder of that name. Without a shipped domain the parts
    of the recipe alone give the name.
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
