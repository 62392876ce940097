"""How the prompts of a data set become rollouts and optimizer steps.

Upstream takes an incomplete last rollout of an epoch. Its batches do not divide evenly over the
data-parallel ranks: one rank runs fewer forward passes than the others, and the collectives of
ZeRO-3 wait for each other for ever. DeepSpeed counts micro-batches over the whole run, so a
rollout that is no whole number of optimizer steps shifts every later one. So it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
