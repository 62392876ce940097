"""Batches over ranks, models over GPUs, engines, and the bound on the age of samples.

Upstream hands a rollout's batches to the data-parallel ranks in equal chunks. If they do not divide
evenly, one rank runs fewer forward passes than the others, and the collectives of ZeRO-3 hang.
DeepSpeed counts micro-batches over the whole run, so a rollout must be a whole number of optimizer
steps. Every function takes ``value``: dotted key -> its value.
"""

from __future__ import annotations

import math

from sg_rlhf.config.derived import topology
from sg_rlhf.config.derived.async_config import async_config
from sg_rlhf.config.derived.topology import Value
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES


def check_engine_count(value: Value) -> None:
    """Refuse a recipe without a number of engines: the one count without a default."""
    if value("vllm.num_engines") is None:
        raise ConfigError("vllm.num_engines: not set: expected 1 or more")


def check_unsupported(value: Value) -> None:
    """Refuse what OpenRLHF has and this project leaves out."""
    estimator, critic = "algo.advantage.estimator", "a critic is not supported"
    for key, applies, what, remedy in (
        (
            estimator,
            value(estimator) == "gae",
            critic,
            f"set {estimator}=group_norm, GRPO's, or another one",
        ),
        (
            "critic.model_name_or_path",
            bool(value("critic.model_name_or_path")),
            critic,
            "take it out",
        ),
        ("critic.freezing_steps", value("critic.freezing_steps") >= 0, critic, "take it out"),
        (
            "data.max_images_per_prompt",
            value("data.max_images_per_prompt") > 0,
            "images are not supported",
            "set it to 0",
        ),
        (
            "ds.ring_attn_size",
            value("ds.ring_attn_size") != 1,
            "ring attention is not supported",
            "set it to 1; ds.packing_samples and a larger ds.zero_stage save memory",
        ),
        (
            "ds.tensor_parallel_size",
            value("ds.tensor_parallel_size") != 1,
            "the trainer's tensors are not split over ranks",
            "set it to 1, with ds.zero_stage=3; vllm.tensor_parallel_size is the engines'",
        ),
    ):
        if applies:
            raise ValueError(f"{key}={value(key)}: {what}; {remedy}")


def check_reward(value: Value) -> None:
    """Refuse a recipe without a reward, or without the one that its filter and evaluation need."""
    names = ("reward.remote_url", "train.agent_func_path", "reward.model_name_or_path")
    if not any(map(value, names)):
        raise ValueError(
            "reward.remote_url: not set; name a reward function or server there, or set "
            "train.agent_func_path or reward.model_name_or_path"
        )
    filtering = value("algo.dynamic_filtering_enable")
    if not any(map(value, names[:2])) and (filtering or value("eval.dataset")):
        key = "algo.dynamic_filtering_enable=true" if filtering else "eval.dataset"
        raise ValueError(
            f"{key}: not with the reward model of reward.model_name_or_path alone; set "
            "reward.remote_url or train.agent_func_path"
        )
    if filtering and value("rollout.n_samples_per_prompt") == 1:
        raise ValueError(
            "rollout.n_samples_per_prompt=1: expected 2 or more with "
            "algo.dynamic_filtering_enable=true"
        )
    low, high = value("algo.dynamic_filtering_range")
    if filtering and low >= high:
        raise ValueError(f"algo.dynamic_filtering_range=[{low}, {high}]: expected [LOW, HIGH]")


def check_generation(value: Value) -> None:
    """Refuse request sizes and asynchronous settings that upstream cannot run."""
    is_async, size = value("train.async_enable"), value("rollout.batch_size")
    requested = value("rollout.vllm_generate_batch_size")
    if requested and requested < size:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={requested}: expected rollout.batch_size={size} or "
            "more; leave it unset"
        )
    if requested and requested > size and not is_async:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={requested}: above rollout.batch_size={size} the "
            "rest is trained after a weight sync: set train.async_enable=true, or leave it unset"
        )
    if value("train.partial_rollout_enable") and not is_async:
        raise ValueError(
            "train.partial_rollout_enable=true: expected train.async_enable=true, or false"
        )
    if is_async and value("vllm.enable_sleep") and value("train.colocate_all"):
        raise ValueError(
            "vllm.enable_sleep=true: not with train.async_enable=true: engines sample while the "
            "policy trains; set it to false"
        )


def check_placement(value: Value) -> None:
    """Refuse models that share GPUs and differ in their number."""
    shared = value("train.colocate_all") or value("train.colocate_actor_ref")
    for key in ("num_nodes", "num_gpus_per_node"):
        actor, ref = value(f"actor.{key}"), value(f"ref.{key}")
        if shared and topology.has_reference(value) and actor != ref:
            raise ValueError(
                f"actor.{key}={actor}, ref.{key}={ref}: must be equal, as the two models share "
                "their accelerators"
            )
    policy = topology.gpus_of(value, "actor")
    if value("train.colocate_all"):
        for name in topology.models(value):
            size = topology.gpus_of(value, name)
            if size > policy:
                raise ValueError(
                    f"{name}.num_nodes * {name}.num_gpus_per_node = {size}: more than the actor's "
                    f"{policy}, with which it shares them (train.colocate_all=true)"
                )
    engines = value("vllm.num_engines") * value("vllm.tensor_parallel_size")
    if topology.engines_share(value) and policy != engines:
        raise ValueError(
            f"actor.num_nodes * actor.num_gpus_per_node = {policy}, vllm.num_engines * "
            f"vllm.tensor_parallel_size = {engines}: must be equal with train.colocate_all=true"
        )


def check_batches(value: Value) -> None:
    """Refuse batches that do not divide evenly among ranks and optimizer steps."""
    ranks = topology.data_parallel_ranks(value)
    size, group = value("rollout.batch_size"), value("rollout.n_samples_per_prompt")
    samples, step = size * group, value("train.batch_size")
    rollout = f"rollout.batch_size * rollout.n_samples_per_prompt = {size} * {group} = {samples}"
    if samples % step:
        raise ValueError(
            f"{rollout}: not divisible by train.batch_size={step}, so an optimizer step would "
            "run over into the next rollout"
        )
    dynamic = value("train.dynamic_batch_enable")
    train_micro, score_micro = value("train.micro_batch_size"), value("rollout.micro_batch_size")
    for name, count in ranks.items():
        on = f"{count} data-parallel ranks of {name}"
        learns = name == "actor"
        if dynamic:
            if learns and step % count:
                raise ValueError(f"train.batch_size={step}: not divisible by the {on}")
            if ranks["actor"] % count:
                raise ValueError(f"{on}: must divide the {ranks['actor']} of actor")
            continue
        if learns and step % (train_micro * count):
            raise ValueError(
                f"train.batch_size={step}: not divisible by train.micro_batch_size={train_micro} "
                f"times the {on}"
            )
        # A single rank takes a smaller last batch as well.
        if count > 1 and samples % (score_micro * count):
            raise ValueError(
                f"{rollout}: not divisible by rollout.micro_batch_size={score_micro} times the {on}"
            )


def check_engines(value: Value) -> None:
    """Refuse settings of weight sync, sampling and LoRA that do not go together."""
    if value("vllm.sync_with_ray"):
        raise ValueError(
            "vllm.sync_with_ray=true: the weights are sent in buckets, without Ray's collectives; "
            "set it to false"
        )
    if value("rollout.top_p") < 1:
        raise ValueError(
            f"rollout.top_p={value('rollout.top_p'):g}: the engine would renormalise, "
            "and the trainer's log-probs would not match; set it to 1"
        )
    if value("ds.lora.rank") > 0 and value("ds.load_in_4bit"):
        raise ValueError(
            f"ds.lora.rank={value('ds.lora.rank')}: not with ds.load_in_4bit=true: the engine "
            "takes adapters merged into their layers; set it to false"
        )


def check_async(value: Value) -> None:
    """Refuse samples that ``sg.max_staleness`` would never let through, or without a correction."""
    config = async_config(value)
    if config is None:
        return
    partial, bound = config.partial, config.max_staleness
    size, request = config.batch_size, config.request_size
    # A request is sent once the remaining prompts no longer fill a rollout.
    rollouts = -(-(request + size - math.gcd(request, size)) // size)
    if rollouts > config.max_in_flight + 1:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={request}: with the prompts left over from before, "
            f"up to {rollouts} rollouts of rollout.batch_size={size}, of which the last is "
            f"{rollouts - 1} weight syncs old: raise sg.max_staleness={bound} and "
            f"train.async_queue_size={value('train.async_queue_size')}, or lower it"
        )
    if partial and value("train.full_determinism_enable"):
        raise ValueError(
            "train.partial_rollout_enable=true: not with train.full_determinism_enable=true: which "
            "tokens a weight sync comes between is a matter of time; set one of them to false"
        )
    loss = value("actor.policy_loss_type")
    takes_correction = loss in POLICY_LOSS_TYPES or loss == "ppo"
    corrected = value("algo.advantage.is_correction_level") != "off" and takes_correction
    if bound > 0 and not corrected:
        raise ValueError(
            f"train.async_enable=true: samples are up to sg.max_staleness={bound} updates "
            "old, and no correction is on: set sg.correction=tis (with a loss that takes it), or "
            "sg.max_staleness=0"
        )
