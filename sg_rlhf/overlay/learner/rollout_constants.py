"""Constants of the loss that are computed over a whole rollout before its update.

So a token's weight does not depend on how the rollout is cut into micro-batches and ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch.distributed import ProcessGroup

from sg_rlhf.algo import lopti
from sg_rlhf.algo.token_weights import weight_sum_and_count
from sg_rlhf.algo.weightings.stare import Stare
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.overlay.checkpoints import consensus
from sg_rlhf.overlay.learner.policy_loss import (
    RolloutConstants,
    UpdateLossSettings,
    loss_batch,
    weighting_context,
)
from sg_rlhf.overlay.learner.replay_buffer import (
    Denominators,
    batch_on_device,
    policy_forward,
)
from sg_rlhf.overlay.model.log_prob_head import PolicyModel


def sum_over_rollout(
    samples: Sequence[Experience],
    group: ProcessGroup,
    value_of_sample: Callable[[Experience], torch.Tensor],
) -> torch.Tensor:
    """Float64 sum over the samples of all data-parallel ranks; every rank must call it."""
    total = functools.reduce(torch.add, map(value_of_sample, samples)).double()
    total = total.to(torch.cuda.current_device())
    torch.distributed.all_reduce(total, group=group)
    return total


def mean_weight(
    samples: Sequence[Experience],
    group: ProcessGroup,
    settings: UpdateLossSettings,
    rollout: RolloutConstants,
) -> float:
    """Mean token weight of the rollout under the policy that sampled it (``batch_mean``)."""
    if rollout.surprisal_cuts is not None:  # to the samples, which are in host memory
        rollout = dataclasses.replace(rollout, surprisal_cuts=rollout.surprisal_cuts.cpu())
    weighting = settings.weighting

    def sum_and_count(item: Experience) -> torch.Tensor:
        batch = loss_batch(item, weighting, Denominators())
        eps = (settings.policy.eps_low, settings.policy.eps_high)
        context = weighting_context(batch, rollout, eps, None)
        assert batch.old_log_probs_BT is not None
        return weight_sum_and_count(
            batch.old_log_probs_BT, weighting, batch.mask_BT, context=context
        )

    total = sum_over_rollout(samples, group, sum_and_count)
    return float(total[0] / total[1])


def count_lopti_tokens(
    samples: Sequence[Experience], group: ProcessGroup, threshold: float, name: str
) -> int:
    """Response tokens of the rollout in a pass of :data:`sg_rlhf.algo.lopti.PASSES`."""

    def count(item: Experience) -> torch.Tensor:
        in_pass = lopti.in_pass(item.action_log_probs, threshold, name)
        counted: torch.Tensor = in_pass & item.action_mask.bool()
        return counted.sum()

    return int(sum_over_rollout(samples, group, count))


def surprisal_cuts(
    samples: Sequence[Experience], group: ProcessGroup, weighting: Stare
) -> torch.Tensor:
    """:meth:`Stare.cuts` of the response tokens of all data-parallel ranks; each must call it."""
    tokens = []
    for item in samples:
        valid = item.action_mask.bool()
        pair = (item.action_log_probs[valid], item.advantages[valid])
        tokens.append(torch.stack([values.float().cpu() for values in pair]))
    per_rank = consensus.all_gather_objects(torch.cat(tokens, dim=1), group)
    old_log_probs, advantages = torch.cat(per_rank, dim=1)
    cuts = weighting.cuts(old_log_probs, advantages, torch.ones_like(advantages))
    return cuts.to(torch.cuda.current_device())


@torch.no_grad()
def entropy_threshold(
    batches: Iterable[list[Experience]],
    group: ProcessGroup,
    actor: PolicyModel,
    weighting: TopEntropy,
    args: Namespace,
) -> float:
    """The entropy above which ``weighting`` trains a token, by a forward pass; on every rank."""
    entropies = []
    for samples in batches:
        batch = batch_on_device(samples, args)
        _, output = policy_forward(actor, batch, return_output=True, return_entropy=True)
        entropy_BT = output.entropy[:, -batch.action_mask.shape[1] :]
        entropies.append(entropy_BT[batch.action_mask.bool()].float().cpu())
    per_rank = consensus.all_gather_objects(torch.cat(entropies), group)
    return float(weighting.threshold(torch.cat(per_rank)))
