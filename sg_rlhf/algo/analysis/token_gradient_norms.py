"""Exact norms of the gradient of a token's log-prob, for comparison with the paper's bound.

Theorem 3.5 of arXiv 2511.00066 bounds the norm of one token's gradient by w (1 - p), Eq. 16:

    w (1 - p) * lower  <=  ||w * grad_theta log pi(y)||_2  <=  sqrt(2) * w (1 - p) * upper

where ``lower`` and ``upper`` are products of the network's singular values at this token, which
nobody computes. The proof does not give a ``lower`` above 0: the head has more rows than columns,
so it maps some vectors to 0. The part at the output layer has no unknowns:

    grad_h log pi(y) = e_y - pi,     1 - p  <=  ||e_y - pi||_2  <=  sqrt(2) (1 - p)

with h the logits, pi their softmax and e_y the sampled token's unit vector.

Shape suffixes: ``N`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def logit_gradient_norms(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """1 - p and ||e_y - pi||_2 of target tokens.

    1 - p is the sum over the other tokens and not a difference, so it is exact near p = 1: 1e-20
    stays 1e-20.

    Args:
        logits_NV: [N, V]; read without a gradient.
        targets_N: [N], token ids.

    Returns:
        ``(one_minus_p_N, norm_N)``, float64.
    """
    probs_NV = logits_NV.detach().double().softmax(-1)
    others_NV = probs_NV.scatter(-1, targets_N[:, None], 0.0)
    one_minus_p_N = others_NV.sum(-1)
    norm_N = (one_minus_p_N.square() + others_NV.square().sum(-1)).sqrt()
    return one_minus_p_N, norm_N


def token_gradient_norms(
    log_probs_N: Tensor, params: Sequence[Tensor], *, chunk: int = 16
) -> Tensor:
    """||grad_theta log pi(y)||_2 of each token.

    Args:
        log_probs_N: [N], with the graph to ``params``.
        params: the parameters theta; not changed, and their ``.grad`` is not set.
        chunk: tokens whose backward passes run as one (``vmap``), with as many gradients in memory.
            1 runs a plain backward pass per token, for models with an operation that cannot be
            batched.

    Returns:
        float64 [N].

    Raises:
        ValueError: chunk < 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk!r}: expected 1 or more")
    norms = [_norms(part, params, batched=chunk > 1) for part in torch.split(log_probs_N, chunk)]
    return torch.cat(norms)


def _norms(log_probs_N: Tensor, params: Sequence[Tensor], *, batched: bool) -> Tensor:
    outputs = torch.eye(len(log_probs_N), dtype=log_probs_N.dtype, device=log_probs_N.device)
    gradients = torch.autograd.grad(
        log_probs_N,
        list(params),
        outputs if batched else outputs[0],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    squares_N = torch.zeros(len(log_probs_N), dtype=torch.float64, device=log_probs_N.device)
    for gradient in gradients:
        if gradient is not None:
            rows = gradient.reshape(len(log_probs_N), -1)
            squares_N += torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    return squares_N.sqrt()
