"""Log-probs of given tokens from materialised logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sg_rlhf.algo.log_probs.online_softmax import slices

#: Rows that are handled at a time.
_ROWS = 1024


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of target tokens from logits; OpenRLHF's name and arguments.

    Without flash-attn OpenRLHF's function allocates, in its backward pass, a tensor of the size of
    all logits for every 1,024 rows. This one allocates the gradient once.

    Args:
        logits: [..., V]; divided by ``temperature`` in place unless that is 1, as upstream does.
        labels: [...], token ids.
        temperature: T > 0.

    Returns:
        [...], in the dtype of the logits.
    """
    if temperature != 1.0:
        logits.div_(temperature)
    log_probs: Tensor = _FromLogits.apply(logits, labels)  # type: ignore[no-untyped-call]
    return log_probs


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        flat_NV, labels_N = logits.flatten(0, -2), labels.flatten()
        lse_N = torch.empty_like(flat_NV[:, 0])
        for part in slices(len(lse_N), _ROWS):
            lse_N[part] = torch.logsumexp(flat_NV[part], dim=-1)
        ctx.save_for_backward(logits, labels, lse_N)
        chosen_N = flat_NV.gather(-1, labels_N[:, None])[:, 0]
        return (chosen_N - lse_N).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor) -> tuple[Tensor, None]:
        logits, labels, lse_N = ctx.saved_tensors
        flat_NV, labels_N, grad_N = (
            logits.flatten(0, -2),
            labels.flatten(),
            grad_log_probs.flatten(),
        )
        grad_NV = torch.empty_like(flat_NV)
        for part in slices(len(lse_N), _ROWS):
            block = torch.sub(flat_NV[part], lse_N[part, None], out=grad_NV[part])
            block.exp_().mul_(-grad_N[part, None])
        grad_NV.scatter_add_(1, labels_N[:, None], grad_N[:, None])
        return grad_NV.view(logits.shape), None
