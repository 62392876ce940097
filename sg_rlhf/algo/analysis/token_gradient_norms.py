"""The gradient of a token's log-probability, exactly, beside the paper's bound for it.

Theorem 3.5 of arXiv 2511.00066 bounds the norm of one token's gradient by w (1 - p), Eq. 16:

    w (1 - p) * lower  <=  ||w * grad_theta log pi(y)||_2  <=  sqrt(2) * w (1 - p) * upper

where ``lower`` and ``upper`` are products of the network's singular values at this token and are
not computed by anybody. What the proof shows is the part at the output layer, without unknowns:

    grad_h log pi(y) = e_y - pi,     1 - p  <=  ||e_y - pi||_2  <=  sqrt(2) (1 - p)

with h the logits, pi their softmax and e_y the sampled token's unit vector.

Shape suffixes: ``N`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def logit_gradient_norms(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(1 - p, ||e_y - pi||_2) of the targets, float64 [N], without a gradient.

    1 - p is the sum over the other tokens, not a difference, so that it is exact for sure tokens
    too: 1e-20 stays 1e-20.
    """
    probs_NV = logits_NV.detach().double().softmax(-1)
    others_NV = probs_NV.scatter(-1, targets_N[:, None], 0.0)
    one_minus_p_N = others_NV.sum(-1)
    norm_N = (one_minus_p_N.square() + others_NV.square().sum(-1)).sqrt()
    return one_minus_p_N, norm_N


def token_gradient_norms(
    log_probs_N: Tensor, params: Sequence[Tensor], *, chunk: int = 16
) -> Tensor:
    """||grad_theta log pi(y)||_2 of each token, float64 [N].

    log_probs_N carries the graph to ``params``, which are not changed and get no ``.grad``. The
    forward pass is shared; the backward passes of ``chunk`` tokens run as one (``vmap`` over the
    backward pass), with ``chunk`` gradients in memory. A chunk of 1 is one plain backward pass per
    token, for models with an operation that cannot be batched. Raises ``ValueError`` for chunk < 1.
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
