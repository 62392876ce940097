"""Where a recipe's run goes, and what it takes of the machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.recipe import Config


def run_dir_of(given: str | None, files: Sequence[str]) -> Path:
    """The run directory: the one that was given, else ``runs/<recipe>``.

    Args:
        given: by the user; an address is none, and would become a folder of that name on whatever
            machine writes first.
        files: of the recipe.

    Raises:
        ConfigError: naming the address and the fix.
    """
    if given and "://" in given:
        raise ConfigError(
            f"--run-dir {given}: expected a folder; mount it on every machine of the run (a shared "
            "file system, or the bucket by mountpoint-s3, gcsfuse or rclone) and give its path"
        )
    return Path(given or Path("runs") / ("_".join(Path(file).stem for file in files) or "run"))


def gpus_beside_policy(config: Config) -> int:
    """GPUs of engines and reference that are not the policy's, on all machines."""
    value = config.value
    together = value("train.colocate_all")
    if together and not value("train.async_enable"):
        return 0
    gpus = (value("vllm.num_engines") or 0) * value("vllm.tensor_parallel_size")
    if value("algo.kl.init_coef") > 0 and not (together or value("train.colocate_actor_ref")):
        gpus += value("ref.num_nodes") * value("ref.num_gpus_per_node")
    return int(gpus)
