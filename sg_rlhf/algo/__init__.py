"""GRPO-SG as pure functions (arXiv 2511.00066): weights, loss, KL, advantages, statistics.

It needs PyTorch and nothing else. The loss in one call is ``sg_rlhf.algo.token_loss``. An update
in a plain training loop, with KL and metrics::

    from sg_rlhf.algo.advantages import group_advantages
    from sg_rlhf.algo.aggregation import aggregate
    from sg_rlhf.algo.kl import kl_estimate
    from sg_rlhf.algo.policy_loss import policy_loss_terms
    from sg_rlhf.algo.weightings import make_weighting

    weighting = make_weighting("grpo_sg")  # Eq. 19; its parameters: make_weighting(name, {...})
    advantages = group_advantages(rewards_BG).reshape(-1, 1).expand_as(response_mask)
    log_probs = policy(sequences)  # [B, T], of the response tokens, with gradient
    terms = policy_loss_terms(
        log_probs, old_log_probs, advantages, response_mask, weighting, eps_low=0.2, eps_high=0.24
    )
    kl = kl_estimate(log_probs, ref_log_probs, terms.weights_BT, "wk3")
    loss = terms.loss + 0.001 * aggregate(kl, response_mask)
    loss.backward()
    optimizer.step()
    metrics = terms.statistics.metrics()  # {"weight_mean": ..., "clip_ratio": ..., ...}

``log_probs.fused_log_probs`` computes the log-probs from hidden states without logits,
``rollout_correction`` corrects for an engine that samples with slightly different probabilities,
and ``lopti`` splits an update in two.

No function here talks to the network or to other ranks, and none waits for the device unless its
docstring says so. Sums to be added over micro-batches and ranks are returned as tensors.

Shape suffixes: ``B`` responses in a micro-batch, ``T`` response tokens (right-padded), ``G``
responses of one prompt. ``x_BT`` has shape [B, T]. A name without a suffix is a scalar, or a
public argument whose shape its docstring gives. A mask is 1 (or True) on the tokens that the
policy sampled.

Symbols: ``p`` the token's probability under the current policy, ``r`` the ratio p / p_old, ``A``
the advantage, ``w`` the token weight, ``rho`` the ratio p_ref / p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sg_rlhf.algo.policy_loss import token_loss

__all__ = ["token_loss"]


def __getattr__(name: str) -> Any:
    # Only when asked for: this package is imported to check recipes as well, where torch is not.
    if name == "token_loss":
        from sg_rlhf.algo.policy_loss import token_loss

        return token_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
