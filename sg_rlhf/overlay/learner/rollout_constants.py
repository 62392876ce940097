"""Constants of the loss that are computed over a whole rollout before its update.

All ranks use one value for all tokens of the rollout. So a token's weight does not depend on how
the rollout is cut into micro-batches, optimizer steps and ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.algo import lopti
from sg_rlhf.algo.token_weights import weight_sum_and_count
from sg_rlhf.algo.weightings import Weighting
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.overlay.learner import gradient_check
from sg_rlhf.overlay.learner.policy_loss import RolloutConstants, loss_batch, weighting_context
from sg_rlhf.overlay.learner.replay_buffer import (
    Denominators,
    batch_on_device,
    policy_forward,
)

if TYPE_CHECKING:
    from sg_rlhf.overlay.learner.update import SGActorPPOTrainer


def sum_over_rollout(
    trainer: SGActorPPOTrainer, value_of_sample: Callable[[Experience], torch.Tensor]
) -> torch.Tensor:
    """Sum over the replay buffers of all data-parallel ranks; every rank must call it.

    Args:
        trainer: of this rank.
        value_of_sample: a tensor of the same shape for every sample.

    Returns:
        float64, on the rank's device.
    """
    values = map(value_of_sample, trainer.replay_buffer.items)
    total = functools.reduce(torch.add, values).double().to(torch.cuda.current_device())
    group = trainer.strategy.ds_device_mesh["dp"].get_group()
    torch.distributed.all_reduce(total, group=group)
    return total


def mean_weight(trainer: SGActorPPOTrainer, weighting: Weighting) -> float:
    """Mean token weight of the rollout under the policy that sampled it (``batch_mean``)."""

    def sum_and_count(item: Experience) -> torch.Tensor:
        settings, batch = trainer.loss_settings, loss_batch(item, weighting, Denominators())
        eps = (settings.policy.eps_low, settings.policy.eps_high)
        context = weighting_context(batch, RolloutConstants(), eps, None)
        assert batch.old_log_probs_BT is not None
        return weight_sum_and_count(
            batch.old_log_probs_BT, weighting, batch.mask_BT, context=context
        )

    total = sum_over_rollout(trainer, sum_and_count)
    return float(total[0] / total[1])


def count_lopti_tokens(trainer: SGActorPPOTrainer, name: str) -> int:
    """Response tokens of the rollout that take part in a pass of ``sg.update=lopti``.

    Args:
        trainer: of this rank.
        name: of :data:`sg_rlhf.algo.lopti.PASSES`.
    """
    threshold = trainer.args.sg.lopti_threshold

    def count(item: Experience) -> torch.Tensor:
        in_pass = lopti.in_pass(item.action_log_probs, threshold, name)
        counted: torch.Tensor = in_pass & item.action_mask.bool()
        return counted.sum()

    return int(sum_over_rollout(trainer, count))


@torch.no_grad()
def entropy_threshold(
    trainer: SGActorPPOTrainer, weighting: TopEntropy, batches: Iterable[list[int]]
) -> float:
    """The entropy above which a token is in the share of tokens that ``weighting`` trains.

    Takes a forward pass over the rollout.

    Args:
        trainer: of this rank; every rank must call it.
        weighting: whose share it is.
        batches: indices in the replay buffer that are computed together.
    """
    entropies = []
    for indices in batches:
        items = [trainer.replay_buffer.items[i] for i in indices]
        batch = batch_on_device(items, trainer.args)
        _, output = policy_forward(trainer.actor, batch, return_output=True, return_entropy=True)
        entropy_BT = output.entropy[:, -batch.action_mask.shape[1] :]
        entropies.append(entropy_BT[batch.action_mask.bool()].float().cpu())
    group = trainer.strategy.ds_device_mesh["dp"].get_group()
    per_rank = gradient_check.all_gather_objects(torch.cat(entropies), group)
    return float(weighting.threshold(torch.cat(per_rank)))
