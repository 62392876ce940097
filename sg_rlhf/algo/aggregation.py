"""Reduces a per-token loss to one scalar, exactly under every sharding of a batch."""

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
    """Mean of a loss over tokens, or over responses.

    ::

        token level:      sum(loss * mask) / number of tokens
        response level:   mean over responses of (sum_t(loss * mask) / tokens of the response)

    With the totals of the whole optimizer step, the losses of its micro-batches and ranks add up to
    the loss of the whole batch, times ``dp_size``, because data parallelism averages gradients over
    ranks. Equal to OpenRLHF 0.11.2 bit for bit.

    Args:
        loss_BT: [B, T]. Masked positions may hold anything, also NaN.
        mask_BT: [B, T], 1 or True on the tokens that count.
        token_level_loss: mean over tokens (True) or over the responses that have a token (False).
        dp_size: number of data-parallel ranks.
        batch_num_tokens: tokens of the whole optimizer step, over all micro-batches and ranks; for
            the token level. None for those of this batch, without ``dp_size``.
        global_batch_size: responses of the whole optimizer step; for the response level. None for
            those of this batch, without ``dp_size``.

    Returns:
        A scalar; 0 for a batch without tokens (upstream gives 0 / 0 = NaN).
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
