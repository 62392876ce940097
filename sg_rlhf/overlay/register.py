"""Puts our classes where upstream looks for its own, in the driver and in every worker.

The driver replaces four names of upstream's modules by subclasses. Ray ships a subclass to a
worker by its module's name, and importing that module there registers what runs inside it, so
this works on one node or on many, as long as ``sg_rlhf`` is installed on each.
"""

from __future__ import annotations

from typing import Any

WORKER_SETUP_HOOK = "sg_rlhf.overlay.register.worker_setup"


def worker_setup() -> None:
    """Ray's ``worker_process_setup_hook``: runs first in every worker process."""
    from sg_rlhf.overlay import jit_builds, rotary
    from sg_rlhf.overlay.cpu import platform

    platform.install()
    jit_builds.install()
    rotary.install()


def install_driver() -> Any:
    """Register the overlay in this process and return upstream's training module."""
    from sg_rlhf.overlay.cpu import platform

    platform.install()
    import openrlhf.cli.train_ppo_ray as upstream
    import openrlhf.trainer.ppo_trainer as ppo_trainer
    import openrlhf.trainer.ray.vllm_engine as vllm_engine

    from sg_rlhf.overlay import policy_actor, rollout_engine, trainer

    upstream.PolicyModelActor = policy_actor.RemotePolicyModelActor
    vllm_engine.RolloutRayActor = rollout_engine.RemoteRolloutActor
    ppo_trainer.PPOTrainer = trainer.RemotePPOTrainer
    return upstream
