"""A training run from its first process to the saved model; the loop is ``Controller.fit``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import ray
from openrlhf.trainer.ray.launcher import RayActorGroup
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sg_rlhf.config.derived import topology
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.cluster.placement import Placement
from sg_rlhf.overlay.controller.trainer import Controller
from sg_rlhf.overlay.learner.actor import (
    SGPolicyModelActor,
    SGReferenceModelActor,
    SGRewardModelActor,
)
from sg_rlhf.overlay.rollout import engine_monitor
from sg_rlhf.overlay.rollout.engine import MAX_RESTARTS, SGRolloutActor
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.lookup import value_of

#: Ray's share of a GPU for a process that shares it with other models; none uses so little.
SHARE = 0.2


def train(args: Namespace, placement: Placement) -> None:
    """Start the processes of a run, train, and save the model to ``ckpt.output_dir``."""
    strategy = Strategy(args)
    strategy.print(args)
    value, model = value_of(args), args.actor.model_name_or_path
    if args.sg.run_dir:  # of an earlier start
        (Path(args.sg.run_dir) / engine_monitor.FILE).unlink(missing_ok=True)

    engines = start_engines(args, placement)
    policy = start_ranks(SGPolicyModelActor, args.actor, placement, topology.POLICY)
    reference = reward = None
    if topology.has_reference(value):
        reference = start_ranks(SGReferenceModelActor, args.ref, placement, topology.REFERENCE)
    if topology.has_reward_model(value):
        reward = start_ranks(SGRewardModelActor, args.reward, placement, topology.REWARD)
    controller = (
        ray.remote(Controller)
        .options(scheduling_strategy=placement.of_controller())
        .remote(strategy, policy, reference, reward, engines)
    )

    # Reads the prompts; the learning rate is scheduled over the optimizer steps that they give.
    steps = ray.get(controller.prepare.remote())
    seconds = worker_settings.start_seconds(args.sg.engine_timeout)
    if args.vllm.enable_sleep:
        # Meanwhile the ranks have imported. They take nothing of a GPU before they load the model.
        engine_monitor.wait_for_start(engines, seconds)
        ray.get([engine.sleep.remote() for engine in engines])
    loading = policy.async_init_model_from_pretrained(strategy, model, steps, engines)
    if reference is not None:
        loading += reference.async_init_model_from_pretrained(strategy, model)
    if reward is not None:
        path = args.reward.model_name_or_path
        loading += reward.async_init_model_from_pretrained(strategy, path)
    engine_monitor.wait_for_start(engines, seconds, loading)

    ray.get(controller.fit.remote())
    ray.get(policy.async_save_model())


def start_ranks(rank: type, layout: Namespace, placement: Placement, model: str) -> RayActorGroup:
    """Start the ranks of a model, each on its GPU. They load it later."""
    return RayActorGroup(
        layout.num_nodes,
        layout.num_gpus_per_node,
        ray.remote(rank),
        pg=placement.group_of(model),
        num_gpus_per_actor=SHARE if placement.is_shared(model) else 1,
    )


def start_engines(args: Namespace, placement: Placement) -> list[ActorHandle]:
    """Start the rollout engines, and do not wait for them."""
    vllm, size = args.vllm, args.vllm.tensor_parallel_size
    share = SHARE if placement.is_shared(topology.ENGINES) else 1
    # With several GPUs vLLM starts a worker on each, and the actor itself has none.
    own = share if size == 1 else 0
    bundles = placement.bundle_indices(topology.ENGINES)
    engines = []
    for number in range(vllm.num_engines):
        mine = bundles[number * size : (number + 1) * size]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=placement.group_of(topology.ENGINES),
            placement_group_bundle_index=mine[0],
            placement_group_capture_child_tasks=True,
        )
        actor = ray.remote(max_restarts=MAX_RESTARTS)(SGRolloutActor)
        engines.append(
            actor.options(num_cpus=own, num_gpus=own, scheduling_strategy=strategy).remote(
                model=args.actor.model_name_or_path,
                seed=args.train.seed + number,
                full_determinism=args.train.full_determinism_enable,
                max_model_len=args.data.max_len,
                tensor_parallel_size=size,
                distributed_executor_backend="uni" if size == 1 else "ray",
                bundle_indices=mine if size > 1 else None,
                num_gpus=share,
                gpu_memory_utilization=vllm.gpu_memory_utilization,
                enable_prefix_caching=vllm.enable_prefix_caching,
                enforce_eager=vllm.enforce_eager,
                enable_sleep_mode=vllm.enable_sleep,
                agent_func_path=args.train.agent_func_path,
                remote_rm_url=args.reward.remote_url,
            )
        )
    return engines
