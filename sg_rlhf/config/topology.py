"""Where a recipe's run goes, and what it takes of the machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.input_checks import domain_names
from sg_rlhf.config.recipe import Config


def run_dir_of(given: str | None, files: Sequence[str], config: Config) -> Path:
    """The run directory: the one that was given, else ``runs/<domain>_<recipe>``.

    Args:
        given: by the user; an address is none, and would become a folder of that name on whatever
            machine writes first.
        files: of the recipe.
        config: the recipe. One without a shipped domain is named by its files alone.

    Raises:
        ConfigError: naming the address and the fix.
    """
    if given and "://" in given:
        raise ConfigError(
            f"--run-dir {given}: expected a folder; mount it on every machine of the run (a shared "
            "file system, or the bucket by mountpoint-s3, gcsfuse or rclone) and give its path"
        )
    names = [*domain_names(config)[:1], *(Path(file).stem for file in files)]
    return Path(given or Path("runs") / ("_".join(names) or "run"))


@dataclass(frozen=True)
class Group:
    """Processes that share their GPUs: one placement group.

    Attributes:
        who: the models in it, and "engines".
        size: GPUs, of all machines.
    """

    who: str
    size: int


def groups(value: Callable[[str], Any]) -> list[Group]:
    """The placement groups of a run, in the order in which upstream's ``train`` asks for them.

    Args:
        value: of a dotted key of the recipe, or of upstream's arguments.
    """

    def size(name: str) -> int:
        return int(value(f"{name}.num_nodes") * value(f"{name}.num_gpus_per_node"))

    together, with_reference = value("train.colocate_all"), value("train.colocate_actor_ref")
    pair = value("train.colocate_critic_reward")
    reference = value("algo.kl.init_coef") > 0
    # Upstream gives this estimator a critic, whatever is named, and no other one.
    critic = value("algo.advantage.estimator") == "gae"
    reward = not (value("reward.remote_url") or value("train.agent_func_path"))
    engines = (value("vllm.num_engines") or 0) * value("vllm.tensor_parallel_size")
    share = engines_share(value)
    found = []
    if together or with_reference:
        sharing = ["policy"] + ["reference"] * reference + ["engines"] * share
        if together and not (critic and pair):
            sharing += ["critic"] * critic + ["reward"] * reward
        found.append(Group(", ".join(sharing), size("actor")))
    if engines and not share:
        found.append(Group("engines", int(engines)))
    if not (together or with_reference):
        found.append(Group("policy", size("actor")))
        if reference:
            found.append(Group("reference", size("ref")))
    if critic and pair:
        found.append(Group("critic" + ", reward" * reward, size("critic")))
    elif not together:
        found += [Group("critic", size("critic"))] * critic
        found += [Group("reward", size("reward"))] * reward
    return found


def engines_share(value: Callable[[str], Any]) -> bool:
    """Whether the engines are on the policy's GPUs; upstream's asynchronous ones never are."""
    return bool(value("train.colocate_all") and not value("train.async_enable"))


def gpus(value: Callable[[str], Any]) -> int:
    """GPUs of a run on all machines; without CUDA, as many processes."""
    return sum(group.size for group in groups(value))
