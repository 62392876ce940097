"""Where the models of a run are: placement groups, GPUs and data-parallel ranks.

``plan``, ``launch``, ``doctor``, the checks of a recipe and the overlay all ask this module. Every
function takes ``value``: dotted key -> its value, of a recipe or of upstream's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = Callable[[str], Any]

#: Names of the models of a run, as messages have them.
POLICY, REFERENCE, REWARD, ENGINES = "policy", "reference", "reward", "engines"
#: Ray CPUs of the controller, in addition to one per GPU.
CONTROLLER_CPUS = 1


@dataclass(frozen=True)
class Group:
    """Processes that share their GPUs: one placement group."""

    models: tuple[str, ...]  # names of the models in it; the engines' is :data:`ENGINES`
    size: int  # GPUs, of all machines


def gpus_of(value: Value, name: str) -> int:
    """GPUs of a model on all nodes; name is its section (``actor``, ``ref``, ...)."""
    return int(value(f"{name}.num_nodes") * value(f"{name}.num_gpus_per_node"))


def has_reference(value: Value) -> bool:
    """Whether there is a reference model."""
    return bool(value("algo.kl.init_coef") > 0)


def has_reward_model(value: Value) -> bool:
    """Whether a model gives the rewards, and not a function or a server."""
    return not (value("reward.remote_url") or value("train.agent_func_path"))


def models(value: Value) -> list[str]:
    """Sections of the models that score a rollout, the policy first."""
    used = {"actor": True, "ref": has_reference(value), "reward": has_reward_model(value)}
    return [name for name, is_used in used.items() if is_used]


def data_parallel_ranks(value: Value) -> dict[str, int]:
    """Ranks by model section; each has samples of its own."""
    return {name: gpus_of(value, name) for name in models(value)}


def groups(value: Value) -> list[Group]:
    """The placement groups of a run. The controller is in the first of them."""
    colocate_all = value("train.colocate_all")
    with_policy = colocate_all or value("train.colocate_actor_ref")
    reference, reward = has_reference(value), has_reward_model(value)
    engines = (value("vllm.num_engines") or 0) * value("vllm.tensor_parallel_size")
    share = engines_share(value)
    result = []
    if with_policy:
        sharing = [POLICY] + [REFERENCE] * reference + [ENGINES] * share
        if colocate_all:
            sharing += [REWARD] * reward
        result.append(Group(tuple(sharing), gpus_of(value, "actor")))
    if engines and not share:
        result.append(Group((ENGINES,), int(engines)))
    if not with_policy:
        result.append(Group((POLICY,), gpus_of(value, "actor")))
        if reference:
            result.append(Group((REFERENCE,), gpus_of(value, "ref")))
    if reward and not colocate_all:
        result.append(Group((REWARD,), gpus_of(value, "reward")))
    return result


def engines_share(value: Value) -> bool:
    """Whether the engines are on the policy's GPUs; asynchronous ones never are."""
    return bool(value("train.colocate_all") and not value("train.async_enable"))


def gpus(value: Value) -> int:
    """GPUs of a run on all machines; without CUDA, as many processes."""
    return sum(group.size for group in groups(value))
