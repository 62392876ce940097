"""Reduces a per-token loss to one scalar, exactly under every sharding of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean", "prompt-mean")


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    *,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: Tensor | float | None = None,
    global_batch_size: Tensor | float | None = None,
    prompt_tokens_B: Tensor | None = None,
) -> Tensor:
    """Mean of a loss over tokens, over responses, or over prompts.

    ::

        token level:      sum(loss * mask) / number of tokens
        response level:   mean over responses of (sum_t(loss * mask) / tokens of the response)
        prompt level:     mean over prompts of (sum_it(loss * mask) / tokens of its responses)

    The prompt level is Eq. 5 of arXiv 2511.00066: each prompt has the same share of the update.

    With the totals of the whole optimizer step, the losses of its micro-batches and ranks add up to
    the loss of the whole batch, times ``dp_size``, because data parallelism averages gradients over
    ranks. The first two are equal to OpenRLHF 0.11.2's bit for bit.

    Args:
        loss_BT: [B, T]. Masked positions may hold anything, also NaN.
        mask_BT: [B, T], 1 or True on the tokens that count.
        token_level_loss: mean over tokens (True) or over the responses that have a token (False).
        dp_size: number of data-parallel ranks.
        batch_num_tokens: tokens of the whole optimizer step, over all micro-batches and ranks; for
            the token level. None for those of this batch, without ``dp_size``.
        global_batch_size: responses of the whole optimizer step, for the response level; its
            prompts, for the prompt level. None for those of this batch, without ``dp_size``.
        prompt_tokens_B: [B], tokens that the prompt of each response has in the whole optimizer
            step, as :func:`prompt_token_counts` gives them; chooses the prompt level.

    Returns:
        A scalar; 0 for a batch without tokens (upstream gives 0 / 0 = NaN).
    """
    loss_BT = loss_BT.masked_fill(mask_BT == 0, 0.0)
    if prompt_tokens_B is not None:
        tokens_B = prompt_tokens_B.clamp(min=1)
        total = ((loss_BT * mask_BT).sum(dim=-1) / tokens_B).sum()
        if global_batch_size is None:
            # The shares of a prompt's responses add up to 1.
            prompts = (mask_BT.sum(dim=-1) / tokens_B).sum().round()
            return total / _at_least_one(prompts)
        return total / global_batch_size * dp_size
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


def prompt_token_counts(mask_BT: Tensor, prompts_B: Tensor) -> Tensor:
    """Tokens of each response's prompt, over all responses of the batch.

    Waits for the device.

    Args:
        mask_BT: [B, T], 1 or True on the tokens that count.
        prompts_B: [B], integers, equal for responses of one prompt.

    Returns:
        [B], int64.
    """
    index_B = torch.unique(prompts_B, return_inverse=True)[1]
    tokens_B = (mask_BT != 0).sum(dim=-1)
    return torch.zeros_like(tokens_B).index_add(0, index_B, tokens_B)[index_B]


def _at_least_one(count: Tensor) -> Tensor:
    """The count, or 1 where it is 0; every other count keeps its bits and its dtype."""
    return count + (count == 0)
