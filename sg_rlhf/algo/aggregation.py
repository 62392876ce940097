"""From a per-token loss to one scalar, the same for every sharding of a batch."""

from __future__ import annotations

from torch import Tensor


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    *,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: Tensor | float | None = None,
    global_batch_size: Tensor | float | None = None,
) -> Tensor:
    """Mean over tokens, or over responses; equals OpenRLHF 0.11.2 bit for bit.

    token_level_loss: sum over masked tokens / number of tokens. Otherwise each response is
    averaged first and the responses that have a token count alike. ``batch_num_tokens`` and
    ``global_batch_size`` are the totals of the whole optimizer step over all ranks and
    micro-batches; with them the shards' losses add up to the loss of the whole batch, times
    ``dp_size`` because data parallelism averages gradients over ranks. Without them the totals of
    this shard are used.

    Nothing at a masked position, not even NaN, reaches the value. A shard without any token gives 0
    (upstream: 0 / 0 = NaN).
    """
    loss_BT = loss_BT.masked_fill(mask_BT == 0, 0.0)
    if token_level_loss:
        total = (loss_BT * mask_BT).sum()
        if batch_num_tokens is None:
            return total / _at_least_one(mask_BT.sum())
        return total / batch_num_tokens * dp_size

    tokens_B = mask_BT.sum(dim=-1)
    mean_B = (loss_BT * mask_BT).sum(dim=-1) / (tokens_B + 1e-8)
    has_tokens_B = (tokens_B > 0).float()
    total = (mean_B * has_tokens_B).sum()
    if global_batch_size is None:
        return total / _at_least_one(has_tokens_B.sum())
    return total / global_batch_size * dp_size


def _at_least_one(count: Tensor) -> Tensor:
    """The count, or 1 where it is 0; every other count keeps its bits and its dtype."""
    return count + (count == 0)
