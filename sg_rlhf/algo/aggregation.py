"""Reduces a per-token loss to one scalar, exactly under every sharding of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean", "prompt-mean")


def check_aggregation(name: str) -> None:
    """ValueError for a name that is not in :data:`AGGREGATIONS`."""
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregation={name!r}: expected one of {', '.join(AGGREGATIONS)}")


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    aggregation: str = "token-mean",
    *,
    total: Tensor | float | None = None,
    prompt_tokens: Tensor | None = None,
) -> Tensor:
    """Mean of a loss over tokens, over responses, or over prompts.

    ::

        token-mean    sum(loss * mask) / tokens (DAPO, arXiv 2503.14476)
        seq-mean      mean over responses of (sum_t(loss * mask) / tokens of the response)
                      (GRPO, arXiv 2402.03300)
        prompt-mean   mean over prompts of (sum_it(loss * mask) / tokens of its responses)
                      (Eq. 5 of arXiv 2511.00066): each prompt has the same share of the update

    With ``total`` that of the whole optimizer step, the losses of its micro-batches add up to the
    loss of the whole batch. Where ranks average their gradients, multiply each rank's loss by the
    number of ranks. The first two are equal to OpenRLHF 0.11.2's bit for bit.

    Args:
        loss_BT: [B, T]. Masked positions may hold anything, also NaN.
        mask_BT: [B, T], 1 or True on the tokens that count.
        total: number of tokens, of responses with a token, or of prompts with a token that the mean
            divides by. None for that of this batch.
        prompt_tokens: [B], for prompt-mean: tokens that the prompt of each response has in the
            whole optimizer step, as :func:`prompt_token_counts` gives them.

    Returns:
        A scalar; 0 for a batch without tokens (upstream gives 0 / 0 = NaN).

    Raises:
        ValueError: an unknown aggregation, or prompt-mean without ``prompt_tokens``.
    """
    check_aggregation(aggregation)
    loss_BT = loss_BT.masked_fill(mask_BT == 0, 0.0)
    if aggregation == "token-mean":
        summed = (loss_BT * mask_BT).sum()
        return summed / (_at_least_one(mask_BT.sum()) if total is None else total)
    if aggregation == "seq-mean":
        tokens_B = mask_BT.sum(dim=-1)
        mean_B = (loss_BT * mask_BT).sum(dim=-1) / (tokens_B + 1e-8)
        has_tokens_B = (tokens_B > 0).float()
        summed = (mean_B * has_tokens_B).sum()
        return summed / (_at_least_one(has_tokens_B.sum()) if total is None else total)
    if prompt_tokens is None:
        raise ValueError("aggregation='prompt-mean': expected prompt_tokens, got None")
    tokens_B = prompt_tokens.clamp(min=1)
    summed = ((loss_BT * mask_BT).sum(dim=-1) / tokens_B).sum()
    if total is None:
        # The shares of a prompt's responses add up to 1.
        total = _at_least_one((mask_BT.sum(dim=-1) / tokens_B).sum().round())
    return summed / total


def prompt_token_counts(mask_BT: Tensor, prompts_B: Tensor) -> Tensor:
    """Int64 [B]: tokens of each response's prompt, over all responses of the batch.

    ``prompts_B`` has equal integers for responses of one prompt. Waits for the device.
    """
    index_B = torch.unique(prompts_B, return_inverse=True)[1]
    tokens_B = (mask_BT != 0).sum(dim=-1)
    return torch.zeros_like(tokens_B).index_add(0, index_B, tokens_B)[index_B]


def _at_least_one(count: Tensor) -> Tensor:
    """The count, or 1 where it is 0; every other count keeps its bits and its dtype."""
    return count + (count == 0)
