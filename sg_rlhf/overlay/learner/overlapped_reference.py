"""The reference model's log-probs, computed while the policy already trains on other samples.

Upstream makes the reference's pass over a whole rollout before the update, which needs of it only
the samples of its next optimizer step. Where policy and reference are processes that share no
accelerator, the passes go out step by step once the samples are dealt, and the ranks of the policy
fetch their own as they come to them: the first ones while old log-probs are computed, the others
while a step is trained. A pass has the micro-batches of the update.
"""

from __future__ import annotations

from typing import Any

import ray
import torch

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.learner import micro_batches, old_log_probs
from sg_rlhf.overlay.settings import layout_checks

#: Of each optimizer step, for each rank of the policy, its reference log-probs by micro-batch.
PendingLogProbs = list[list[Any]]


def can_overlap(args: Any) -> bool:
    """Whether the reference's passes of a run can be made during the update.

    Nothing may read its log-probs before (the KL in the reward, a sample that is left out), and
    each rank of the policy must know which are its own.

    Args:
        args: upstream's nested namespace with ``sg``, fitted to the platform.
    """
    ranks = layout_checks.data_parallel_ranks(args)
    return bool(
        platform.active()
        and args.algo.kl.use_loss
        and args.algo.kl.init_coef > 0
        and args.sg.on_nonfinite != "skip"
        and micro_batches.into_micro_batches(args)
        # What reads old log-probs before the update has the policy's own pass before it.
        and old_log_probs.is_needed(args).of != "all"
        and ranks.get("ref") == ranks["actor"]
    )


def submit(group: Any, experiences: list[Any], args: Any) -> PendingLogProbs:
    """Have the reference begin.

    Args:
        group: upstream's group of its ranks.
        experiences: micro-batches as
        :func:`sg_rlhf.overlay.learner.micro_batches.training_micro_batches` has
        them. args: upstream's nested namespace.
    """
    ranks = layout_checks.data_parallel_ranks(args)["actor"]
    own = len(experiences) // ranks
    results, start = [], 0
    ends = [i + 1 for i in range(own) if getattr(experiences[i], micro_batches.IS_LAST_OF_STEP)]
    for end in ends:
        of_step = [experiences[rank * own + i] for rank in range(ranks) for i in range(start, end)]
        start = end
        inputs: dict[str, list[Any]] = {
            "sequences": [e.sequences for e in of_step],
            "action_mask": [e.action_mask for e in of_step],
            "attention_mask": [e.attention_mask for e in of_step],
        }
        if any(e.mm_train_inputs for e in of_step):
            inputs["mm_train_inputs_list"] = [e.mm_train_inputs for e in of_step]
        results.append(group.async_run_method_batch(method_name="forward", **inputs))
    return results


class RankReference:
    """The reference log-probs of one rank's samples, as its update needs them."""

    def __init__(self) -> None:
        self._coming: list[Any] = []
        self._there: dict[int, list[torch.Tensor]] = {}

    def expect(self, results: PendingLogProbs) -> None:
        """The next update's."""
        rank = torch.distributed.get_rank()
        self._coming, self._there = [of_ranks[rank] for of_ranks in results], {}

    def give(self, experience: Any, step: int, place: int) -> None:
        """Give a micro-batch its own, where it has none.

        Args:
            experience: as the update is about to train it.
            step: its optimizer step in the epoch.
            place: its own there.

        Raises:
            NonFiniteError: one is not finite.
        """
        if not self._coming:
            return
        if step not in self._there:
            self._there[step] = ray.get(self._coming[step])
        log_probs_BT = self._there[step][place]
        assert log_probs_BT.shape == experience.action_mask.shape
        old_log_probs.check_finite(
            "reference model", log_probs_BT, experience.action_mask, experience.prompts[0]
        )
        experience.base_action_log_probs = log_probs_BT

    def forget(self) -> None:
        """After the update."""
        self._coming, self._there = [], {}
