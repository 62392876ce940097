"""What must fit together before anything starts: batches over ranks, models over accelerators.

Upstream hands a rollout's batches to the data-parallel ranks in equal chunks. Where they do not
divide evenly, one rank runs fewer forward passes than the others, and the collectives of ZeRO-3
wait for each other for ever. DeepSpeed counts micro-batches over the whole run, so a rollout that
is no whole number of optimizer steps shifts every later one.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from sg_rlhf.config import topology
from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.overlay.settings.async_config import async_config

#: Upstream's flags that count something of which there must be one.
COUNTS = (
    "rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size",
    "train.batch_size", "train.micro_batch_size", "train.max_epochs",
    "actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size",
    "ds.ring_attn_size", "ds.tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a data set of ``prompts`` gives a run.

    Attributes:
        prompts: prompts of an epoch.
        left_out: prompts of an epoch that fill no rollout; 0 under dynamic filtering, which
            takes replacements from them.
        epoch_rollouts: rollouts of an epoch; under dynamic filtering the most there can be.
        rollouts: rollouts of the run.
        optimizer_steps: optimizer steps of the run, over which the learning rate is scheduled.
    """

    prompts: int
    left_out: int
    epoch_rollouts: int
    rollouts: int
    optimizer_steps: int

    def remark(self) -> str:
        """What the user should know of it, if anything."""
        if not self.left_out:
            return ""
        return (
            f"{self.left_out} of {self.prompts} prompts are left out of each epoch: "
            "the last rollout would be incomplete"
        )


def plan(prompts: int, args: Any) -> Plan:
    """The rollouts and optimizer steps of ``prompts`` prompts an epoch; see :class:`Plan`."""
    size = args.rollout.batch_size
    each, left_out = divmod(prompts, size)
    rollouts = each * args.train.num_episodes
    steps = size * args.rollout.n_samples_per_prompt // args.train.batch_size
    return Plan(
        prompts=prompts,
        left_out=0 if args.algo.dynamic_filtering_enable else left_out,
        epoch_rollouts=each,
        rollouts=rollouts,
        optimizer_steps=rollouts * steps * args.train.max_epochs,
    )


def check_prompts(plan: Plan, args: Any) -> None:
    """Refuse a data set that does not fill one rollout.

    Raises:
        UnusablePrompts: one line naming the keys and the values.
    """
    if not plan.epoch_rollouts:
        raise UnusablePrompts(
            f"rollout.batch_size={args.rollout.batch_size}: the data set has only {plan.prompts} "
            "prompts (data.prompt_dataset, data.max_samples)"
        )


def check_flags(flat: dict[str, Any]) -> None:
    """Refuse flags that upstream would trip over while it checks its own.

    Args:
        flat: upstream's parsed flags by their dotted names.

    Raises:
        ValueError: one line naming the key, the value and what was expected.
    """
    for key in COUNTS:
        value = flat[key]
        if value is None or value < 1:
            found = f"{key}: not set" if value is None else f"{key}={value}"
            raise ValueError(f"{found}: expected 1 or more")
    if not (
        flat["reward.remote_url"]
        or flat["train.agent_func_path"]
        or flat["reward.model_name_or_path"]
    ):
        raise ValueError(
            "reward.remote_url: not set; name a reward function or server there, or set "
            "train.agent_func_path or reward.model_name_or_path"
        )
    _check_async_flags(flat)


def _check_async_flags(flat: dict[str, Any]) -> None:
    is_async, size = flat["train.async_enable"], flat["rollout.batch_size"]
    at_once = flat["rollout.vllm_generate_batch_size"]
    if at_once and at_once < size:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={at_once}: expected rollout.batch_size={size} or "
            "more; leave it unset"
        )
    if at_once and at_once > size and not is_async:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={at_once}: above rollout.batch_size={size} the rest "
            "is trained after a weight sync: set train.async_enable=true, or leave it unset"
        )
    if flat["train.partial_rollout_enable"] and not is_async:
        raise ValueError(
            "train.partial_rollout_enable=true: expected train.async_enable=true, or false"
        )
    if not is_async:
        return
    if flat["vllm.enable_sleep"] and flat["train.colocate_all"]:
        raise ValueError(
            "vllm.enable_sleep=true: not with train.async_enable=true: engines sample while the "
            "policy trains; set it to false"
        )
    if flat["train.async_queue_size"] < 1:
        raise ValueError(
            f"train.async_queue_size={flat['train.async_queue_size']}: expected 1 or more"
        )


def check(args: Any) -> None:
    """Refuse batches that do not divide evenly, and placements that upstream has no place for.

    Raises:
        ValueError: one line naming the keys and the values.
    """
    _check_placement(args)
    _check_batches(args)
    _check_async(args)


def _check_async(args: Any) -> None:
    """Refuse what the bound on the samples' age would never let through, or nobody corrects for."""
    lead = async_config(args)
    if lead is None:
        return
    partial = lead.overlaps
    if lead.drop and not partial:
        raise ValueError(
            "sg.stale=drop: without train.partial_rollout_enable=true the age of every sample is "
            "known when it is asked for; set that to true, or sg.stale=wait"
        )
    size, unit = lead.batch, lead.unit
    # They are asked for when what is left of the earlier ones fills no rollout.
    rollouts = -(-(unit + size - math.gcd(unit, size)) // size)
    if rollouts > lead.rollouts + 1:
        raise ValueError(
            f"rollout.vllm_generate_batch_size={unit}: with what is left of the prompts before, up "
            f"to {rollouts} rollouts of rollout.batch_size={size}, of which the last is "
            f"{rollouts - 1} weight syncs old: raise sg.max_staleness={lead.bound} and "
            f"train.async_queue_size={args.train.async_queue_size}, or lower it"
        )
    if partial and args.train.full_determinism_enable:
        raise ValueError(
            "train.partial_rollout_enable=true: not with train.full_determinism_enable=true: which "
            "tokens a weight sync comes between is a matter of time; set one of them to false"
        )
    if partial and args.data.max_images_per_prompt > 0:
        raise ValueError(
            "train.partial_rollout_enable=true: not with images (data.max_images_per_prompt), "
            "whose tokens' weights are not known; set it to false"
        )
    ours = args.actor.policy_loss_type in POLICY_LOSS_TYPES or args.actor.policy_loss_type == "ppo"
    corrected = args.algo.advantage.is_correction_level != "off" and ours
    if lead.bound > 0 and not corrected and args.sg.uncorrected == "refuse":
        raise ValueError(
            f"train.async_enable=true: samples are up to sg.max_staleness={lead.bound} updates "
            "old, and no correction is on: set sg.correction=tis (with a loss that takes it), or "
            "sg.uncorrected=keep to train on them as they are"
        )


def engines_share(args: Any) -> bool:
    """See :func:`sg_rlhf.config.topology.engines_share`."""
    return topology.engines_share(lambda key: operator.attrgetter(key)(args))


def _gpus(model: Any) -> int:
    return int(model.num_nodes * model.num_gpus_per_node)


def _check_placement(args: Any) -> None:
    shared = args.train.colocate_all or args.train.colocate_actor_ref
    pairs = []
    if shared and args.algo.kl.init_coef > 0:
        pairs.append(("actor", "ref"))
    if args.critic.model_name_or_path and args.train.colocate_critic_reward:
        pairs.append(("critic", "reward"))
    for one, other in pairs:
        for key in ("num_nodes", "num_gpus_per_node"):
            a, b = (getattr(getattr(args, name), key) for name in (one, other))
            if a != b:
                raise ValueError(
                    f"{one}.{key}={a}, {other}.{key}={b}: must be equal, as the two models share "
                    "their accelerators"
                )
    if args.train.colocate_all and not args.train.colocate_critic_reward:
        for name in _models(args):
            if _gpus(getattr(args, name)) > _gpus(args.actor):
                raise ValueError(
                    f"{name}.num_nodes * {name}.num_gpus_per_node = {_gpus(getattr(args, name))}: "
                    f"more than the actor's {_gpus(args.actor)}, with which it shares them "
                    "(train.colocate_all=true)"
                )
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    if engines_share(args) and _gpus(args.actor) != engines:
        raise ValueError(
            f"actor.num_nodes * actor.num_gpus_per_node = {_gpus(args.actor)}, vllm.num_engines * "
            f"vllm.tensor_parallel_size = {engines}: must be equal with train.colocate_all=true"
        )


def _models(args: Any) -> list[str]:
    """The sections of the models that upstream runs over a rollout, the actor first."""
    used = {
        "actor": True,
        "ref": args.algo.kl.init_coef > 0,
        "critic": args.critic.model_name_or_path,
        "reward": not args.reward.remote_url,
    }
    return [name for name, is_used in used.items() if is_used]


def data_parallel_ranks(args: Any) -> dict[str, int]:
    """Ranks that have samples of their own, for each model that upstream runs over a rollout.

    Raises:
        ValueError: a model's accelerators do not divide evenly among those that share samples.
    """
    shards = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    ranks = {}
    for name in _models(args):
        gpus = _gpus(getattr(args, name))
        if gpus < 1 or gpus % shards:
            raise ValueError(
                f"{name}.num_nodes * {name}.num_gpus_per_node = {gpus}: not divisible by "
                f"ds.ring_attn_size * ds.tensor_parallel_size = {shards}"
            )
        ranks[name] = gpus // shards
    return ranks


def _check_batches(args: Any) -> None:
    ranks = data_parallel_ranks(args)
    size, group = args.rollout.batch_size, args.rollout.n_samples_per_prompt
    samples, step = size * group, args.train.batch_size
    rollout = f"rollout.batch_size * rollout.n_samples_per_prompt = {size} * {group} = {samples}"
    if samples % step:
        raise ValueError(
            f"{rollout}: not divisible by train.batch_size={step}, so an optimizer step would "
            "run over into the next rollout"
        )
    dynamic = args.train.dynamic_batch_enable
    stage = args.ds.zero_stage
    if dynamic and "critic" in ranks and stage in (1, 2):
        raise ValueError(
            f"train.dynamic_batch_enable=true with a critic and ds.zero_stage={stage}: the critic "
            "would learn from the last micro-batch of each step alone; use ds.zero_stage=3, or "
            "train.dynamic_batch_enable=false"
        )
    micro, part = args.train.micro_batch_size, args.rollout.micro_batch_size
    for name, count in ranks.items():
        on = f"{count} data-parallel ranks of {name}"
        learns = name in ("actor", "critic")
        if dynamic:
            if learns and step % count:
                raise ValueError(f"train.batch_size={step}: not divisible by the {on}")
            if ranks["actor"] % count:
                raise ValueError(f"{on}: must divide the {ranks['actor']} of actor")
            continue
        if learns and step % (micro * count):
            raise ValueError(
                f"train.batch_size={step}: not divisible by train.micro_batch_size={micro} "
                f"times the {on}"
            )
        # A single rank takes a smaller last batch as well.
        if count > 1 and samples % (part * count):
            raise ValueError(
                f"{rollout}: not divisible by rollout.micro_batch_size={part} times the {on}"
            )
