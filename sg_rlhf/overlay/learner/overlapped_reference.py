"""Compute the reference model's log-probs while the policy already trains.

An optimizer step needs only its own samples. So the controller submits one pass per optimizer step,
with the micro-batches of the update. Each policy rank fetches its results when it reaches the step.
"""

from __future__ import annotations

from argparse import Namespace

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import RayActorGroup
from ray import ObjectRef

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.learner import micro_batches, nonfinite, old_log_probs
from sg_rlhf.overlay.settings import rollout_plan

#: Ray references: per optimizer step, per policy rank, the log-probs of its micro-batches.
PendingLogProbs = list[list[ObjectRef]]


def can_overlap(args: Namespace) -> bool:
    """Whether a run may compute the reference's log-probs during the update.

    Nothing may read them earlier, and each policy rank needs a rank of the reference.
    """
    ranks = rollout_plan.data_parallel_ranks(args)
    return bool(
        platform.is_cpu()
        and args.algo.kl.use_loss
        and args.algo.kl.init_coef > 0
        and args.sg.on_nonfinite != "skip"
        and micro_batches.balances_micro_batches(args)
        # Otherwise the policy's own pass over the rollout comes first.
        and old_log_probs.rule_of(args).of != "all"
        and ranks.get("ref") == ranks["actor"]
    )


def submit(group: RayActorGroup, experiences: list[Experience], args: Namespace) -> PendingLogProbs:
    """Start the reference's passes."""
    ranks = rollout_plan.data_parallel_ranks(args)["actor"]
    per_rank = len(experiences) // ranks
    results, start = [], 0
    ends = [
        i + 1 for i in range(per_rank) if getattr(experiences[i], micro_batches.IS_LAST_OF_STEP)
    ]
    for end in ends:
        in_step = [
            experiences[rank * per_rank + i] for rank in range(ranks) for i in range(start, end)
        ]
        start = end
        inputs = micro_batches.forward_inputs(in_step)
        results.append(group.async_run_method_batch(method_name="forward", **inputs))
    return results


class RankReference:
    """The reference log-probs of one policy rank's micro-batches."""

    def __init__(self) -> None:
        self._pending: list[ObjectRef] = []
        self._fetched: dict[int, list[torch.Tensor]] = {}

    def set_pending(self, results: PendingLogProbs) -> None:
        """Set the results for the next update."""
        rank = torch.distributed.get_rank()
        self._pending, self._fetched = [per_rank[rank] for per_rank in results], {}

    def attach(self, experience: Experience, step: int, index: int) -> None:
        """Add the log-probs to a micro-batch, if any are pending; raises NonFiniteError."""
        if not self._pending:
            return
        if step not in self._fetched:
            self._fetched[step] = ray.get(self._pending[step])
        log_probs_BT = self._fetched[step][index]
        assert log_probs_BT.shape == experience.action_mask.shape
        cause = "log-probs of the reference model"
        nonfinite.check_finite(cause, log_probs_BT, experience.action_mask, experience.prompts)
        experience.base_action_log_probs = log_probs_BT

    def clear(self) -> None:
        """Forget the results after an update."""
        self._pending, self._fetched = [], {}
