"""Rollouts and optimizer steps of a data set, and ranks, from upstream's arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from sg_rlhf.config.derived import topology
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.overlay.settings.lookup import value_of


@dataclass(frozen=True)
class Plan:
    """The rollouts and optimizer steps that a data set gives a run.

    ``left_out``: prompts of an epoch that fill no rollout; 0 under dynamic filtering, which takes
    replacements from them. Then ``epoch_rollouts`` is the most there can be.
    """

    prompts: int
    left_out: int
    epoch_rollouts: int
    rollouts: int
    optimizer_steps: int

    def remark(self) -> str:
        """A remark for the user, or none."""
        if not self.left_out:
            return ""
        return (
            f"{self.left_out} of {self.prompts} prompts are left out of each epoch: "
            "the last rollout would be incomplete"
        )


def plan(prompts: int, args: Namespace) -> Plan:
    """Count the rollouts and optimizer steps of a run."""
    size = args.rollout.batch_size
    epoch_rollouts, left_out = divmod(prompts, size)
    rollouts = epoch_rollouts * args.train.num_episodes
    steps = size * args.rollout.n_samples_per_prompt // args.train.batch_size
    return Plan(
        prompts=prompts,
        left_out=0 if args.algo.dynamic_filtering_enable else left_out,
        epoch_rollouts=epoch_rollouts,
        rollouts=rollouts,
        optimizer_steps=rollouts * steps * args.train.max_epochs,
    )


def check_prompts(plan: Plan, args: Namespace) -> None:
    """Refuse a data set that does not fill one rollout; UnusablePrompts in one line."""
    if not plan.epoch_rollouts:
        raise UnusablePrompts(
            f"rollout.batch_size={args.rollout.batch_size}: the data set has only {plan.prompts} "
            "prompts (data.prompt_dataset, data.max_samples)"
        )


def data_parallel_ranks(args: Namespace) -> dict[str, int]:
    """See :func:`sg_rlhf.config.derived.topology.data_parallel_ranks`."""
    return topology.data_parallel_ranks(value_of(args))
