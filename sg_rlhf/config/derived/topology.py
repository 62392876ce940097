"""Where the models of a run are: placement groups, GPUs and data-parallel ranks.

``plan``, ``launch``, ``doctor``, the checks of a recipe and the overlay all ask this module. Every
function takes ``value``: dotted key -> its value, of a recipe or of upstream's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = Callable[[str], Any]


@dataclass(frozen=True)
class Group:
    """Processes that share their GPUs: one placement group.

    Attributes:
        who: the models in it, and "engines".
        size: GPUs, of all machines.
    """

    who: str
    size: int


def gpus_of(value: Value, name: str) -> int:
    """GPUs of a model on all nodes; name is its section (``actor``, ``ref``, ...)."""
    return int(value(f"{name}.num_nodes") * value(f"{name}.num_gpus_per_node"))


def has_reference(value: Value) -> bool:
    """Whether there is a reference model."""
    return bool(value("algo.kl.init_coef") > 0)


def has_critic(value: Value) -> bool:
    """Whether there is a critic: upstream gives one to this estimator alone, named or not."""
    return bool(value("algo.advantage.estimator") == "gae")


def has_reward_model(value: Value) -> bool:
    """Whether a model gives the rewards, and not a function or a server."""
    return not (value("reward.remote_url") or value("train.agent_func_path"))


def models(value: Value) -> list[str]:
    """Sections of the models that score a rollout, the policy first."""
    used = {
        "actor": True,
        "ref": has_reference(value),
        "critic": has_critic(value),
        "reward": has_reward_model(value),
    }
    return [name for name, is_used in used.items() if is_used]


def data_parallel_ranks(value: Value) -> dict[str, int]:
    """Ranks with samples of their own, by model section.

    Raises:
        ValueError: a model's GPUs do not divide evenly among the ranks that share samples.
    """
    shards = value("ds.ring_attn_size") * value("ds.tensor_parallel_size")
    ranks = {}
    for name in models(value):
        size = gpus_of(value, name)
        if size < 1 or size % shards:
            raise ValueError(
                f"{name}.num_nodes * {name}.num_gpus_per_node = {size}: not divisible by "
                f"ds.ring_attn_size * ds.tensor_parallel_size = {shards}"
            )
        ranks[name] = size // shards
    return ranks


def groups(value: Value) -> list[Group]:
    """The placement groups of a run, in the order in which upstream's ``train`` creates them."""
    colocate_all = value("train.colocate_all")
    with_policy = colocate_all or value("train.colocate_actor_ref")
    critic_with_reward = value("train.colocate_critic_reward")
    reference, critic = has_reference(value), has_critic(value)
    reward = has_reward_model(value)
    engines = (value("vllm.num_engines") or 0) * value("vllm.tensor_parallel_size")
    share = engines_share(value)
    result = []
    if with_policy:
        sharing = ["policy"] + ["reference"] * reference + ["engines"] * share
        if colocate_all and not (critic and critic_with_reward):
            sharing += ["critic"] * critic + ["reward"] * reward
        result.append(Group(", ".join(sharing), gpus_of(value, "actor")))
    if engines and not share:
        result.append(Group("engines", int(engines)))
    if not with_policy:
        result.append(Group("policy", gpus_of(value, "actor")))
        if reference:
            result.append(Group("reference", gpus_of(value, "ref")))
    if critic and critic_with_reward:
        result.append(Group("critic" + ", reward" * reward, gpus_of(value, "critic")))
    elif not colocate_all:
        result += [Group("critic", gpus_of(value, "critic"))] * critic
        result += [Group("reward", gpus_of(value, "reward"))] * reward
    return result


def engines_share(value: Value) -> bool:
    """Whether the engines are on the policy's GPUs; asynchronous ones never are."""
    return bool(value("train.colocate_all") and not value("train.async_enable"))


def gpus(value: Value) -> int:
    """GPUs of a run on all machines; without CUDA, as many processes."""
    return sum(group.size for group in groups(value))
