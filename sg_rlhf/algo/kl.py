"""Per-token estimates of KL(pi || pi_ref), plain and weighted.

With rho = pi_ref / pi and d = log pi - log pi_ref = -log rho:

==========  ============================  ==========================================
name        value                         source
==========  ============================  ==========================================
k1          d                             http://joschu.net/blog/kl-approx.html
k2          d^2 / 2                       same
k3          rho + d - 1                   same; Eq. 6 of TR-GRPO, undefined in GRPO-SG
wk3         w * (rho + d - 1)             what the gradient in its Lemma 3.4 belongs to
wk3_eq11    w * rho - log(w * rho) - 1    Eq. 11 of the method's earlier version, TR-GRPO
==========  ============================  ==========================================
"""

from __future__ import annotations

import torch
from torch import Tensor

_D_FLOOR = -10.0  # exp(10) is far above the cap already; a smaller d would overflow the derivative
_CAP = 10.0
_IS_WEIGHT_CAP = 10.0
ESTIMATORS = ("k1", "k2", "k3", "wk3", "wk3_eq11")


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    weights: Tensor | None = None,
    estimator: str = "wk3",
    *,
    old_log_probs: Tensor | None = None,
    unbiased_gradient: bool = False,
) -> Tensor:
    """KL estimate of each sampled token.

    The formulas are in the table above. Gradients in log pi, inside the limits::

        k1: 1     k2: d     k3: 1 - rho     wk3: w (1 - rho)     wk3_eq11: 1 - w rho

    The last one weights one of two terms, and is 0 at rho = 1 / w instead of rho = 1.

    Limits: d is limited to at least -10 before exp, and values to [-10, 10]. wk3 limits k3 first
    and then weights it, so it is w times k3 in value and gradient for every input. With w = 1, wk3
    and wk3_eq11 are k3. k1, k2 and k3 equal OpenRLHF 0.11.2 bit for bit in float32 and bfloat16.

    Args:
        log_probs: [B, T], log-probs of the current policy, with gradient.
        ref_log_probs: [B, T], log-probs of the reference policy.
        weights: [B, T], of :func:`~sg_rlhf.algo.token_weights.token_weights`; read without a
            gradient, and only by wk3 and wk3_eq11.
        old_log_probs: [B, T], log-probs of the policy that sampled; only for the importance weight
            of ``unbiased_gradient``.
        unbiased_gradient: keep the value, but give it the gradient of the true reverse KL: w IS d
            (w = 1 except for wk3), with the constant IS = pi / pi_old, at most 10, or 1 without
            ``old_log_probs``.

    Returns:
        [B, T], float32 (float64 for float64 log-probs).

    Raises:
        ValueError: an unknown estimator, wk3 or wk3_eq11 without weights, or wk3_eq11 with
            ``unbiased_gradient``: it is not w times a KL, so it has no unbiased gradient.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(ESTIMATORS)}")
    if estimator.startswith("wk3") and weights is None:
        raise ValueError(f"estimator={estimator!r}: expected token weights, got None")
    if estimator == "wk3_eq11" and unbiased_gradient:
        raise ValueError(
            "unbiased_gradient=True: expected another estimator than wk3_eq11, whose minimum is at "
            "pi_ref / pi = 1 / w, so it has no gradient that is unbiased for a KL; wk3 has one"
        )
    d = _at_least_float32(log_probs) - _at_least_float32(ref_log_probs)
    applied = weights.detach() if weights is not None and estimator.startswith("wk3") else None
    value = _value(d, applied, estimator)
    if not unbiased_gradient:
        return value

    # d^2 / 2 has the gradient d, which is the score-function form of the reverse KL.
    is_weight: Tensor | float = 1.0
    if old_log_probs is not None:
        log_is_weight = _at_least_float32(log_probs) - _at_least_float32(old_log_probs)
        is_weight = log_is_weight.exp().clamp(max=_IS_WEIGHT_CAP).detach()
    carrier = is_weight * (d**2 / 2.0)
    if applied is not None:
        carrier = applied * carrier
    return value.detach() + carrier - carrier.detach()


def _value(d: Tensor, weights: Tensor | None, estimator: str) -> Tensor:
    if estimator == "k1":
        return d.clamp(min=-_CAP, max=_CAP)
    if estimator == "k2":
        return (d**2 / 2.0).clamp(min=-_CAP, max=_CAP)
    d = d.clamp(min=_D_FLOOR)
    rho = (-d).exp()
    if estimator == "wk3_eq11":
        assert weights is not None
        return (weights * rho - 1 + d - weights.log()).clamp(min=-_CAP, max=_CAP)
    k3 = (rho - 1 + d).clamp(min=-_CAP, max=_CAP)
    return k3 if weights is None else weights * k3


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
