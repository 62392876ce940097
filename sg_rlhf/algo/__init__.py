"""GRPO-SG as pure functions (arXiv 2511.00066): weights, loss, KL, advantages, statistics.

It needs PyTorch and nothing else. The loss is :func:`sg_rlhf.algo.policy_loss.policy_loss`. An
update in a plain training loop, with KL and metrics::

    from sg_rlhf.algo.advantages import group_advantages
    from sg_rlhf.algo.aggregation import aggregate
    from sg_rlhf.algo.kl import kl_estimate
    from sg_rlhf.algo.policy_loss import LossSettings, policy_loss

    settings = LossSettings("grpo_sg", eps_low=0.2, eps_high=0.24)  # the weighting of Eq. 19
    advantages = group_advantages(rewards_BG).flatten()
    log_probs = policy(sequences)  # [B, T], of the response tokens, with gradient
    output = policy_loss(log_probs, old_log_probs, advantages, response_mask, settings)
    kl = kl_estimate(log_probs, ref_log_probs, output.weights_BT, "wk3")
    loss = output.loss + 0.001 * aggregate(kl, response_mask)
    loss.backward()
    optimizer.step()
    metrics = output.statistics.metrics()  # {"weight_mean": ..., "clip_ratio": ..., ...}

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
