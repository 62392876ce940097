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
    """||grad_theta log pi(y)||_2 of each token, float64 [N]; see :func:`token_gradients`."""
    return token_gradients(log_probs_N, params, torch.zeros_like(log_probs_N), chunk=chunk)[0]


def token_gradients(
    log_probs_N: Tensor, params: Sequence[Tensor], scale_N: Tensor, *, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """Norm of each token's gradient g = grad_theta log pi(y), and a sum of their directions.

    Args:
        log_probs_N: [N], with the graph to ``params``.
        params: the parameters theta, D entries in all; not changed, and their ``.grad`` is not set.
        scale_N: [N], of each direction in the sum.
        chunk: tokens whose backward passes run as one (``vmap``), with as many gradients in memory.
            1 runs a plain backward pass per token, for models with an operation that cannot be
            batched.

    Returns:
        ``(norms_N, direction_D)``, float64: ||g||_2 and the sum of scale g / ||g||, without tokens
        whose gradient is 0.

    Raises:
        ValueError: chunk < 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk!r}: expected 1 or more")
    norms, directions = [], []
    for log_probs, scale in zip(
        torch.split(log_probs_N, chunk), torch.split(scale_N, chunk), strict=True
    ):
        gradients = _gradients(log_probs, params, batched=chunk > 1)
        norm = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        norms.append(norm)
        factors = torch.where(norm > 0, scale.double() / norm, 0.0)
        directions.append(factors.to(gradients.dtype) @ gradients)
    return torch.cat(norms), torch.stack(directions).double().sum(0)


def _gradients(log_probs_N: Tensor, params: Sequence[Tensor], *, batched: bool) -> Tensor:
    """Of each token over all parameters as one vector, [N, D]."""
    tokens = len(log_probs_N)
    outputs = torch.eye(tokens, dtype=log_probs_N.dtype, device=log_probs_N.device)
    found = torch.autograd.grad(
        log_probs_N,
        list(params),
        outputs if batched else outputs[0],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    rows = [
        param.new_zeros(tokens, param.numel()) if grad is None else grad.reshape(tokens, -1)
        for param, grad in zip(params, found, strict=True)
    ]
    return torch.cat(rows, dim=1)
