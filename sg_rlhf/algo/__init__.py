"""GRPO-SG as pure functions (arXiv 2511.00066): weights, loss, KL, advantages, statistics.

Imports torch and the standard library, nothing else. No function here talks to the network, to
other ranks or to the host: sums that must be added over micro-batches and ranks are returned as
tensors.

Shape suffixes: ``B`` responses in a micro-batch, ``T`` response tokens (right-padded), ``G``
responses of one prompt. ``x_BT`` has shape [B, T]; a name without a suffix is a scalar, or a
public argument whose shape its docstring gives. A mask is 1 (or True) on the tokens that the
policy sampled.

Symbols: ``p`` the token's probability under the current policy, ``r`` the ratio p / p_old, ``A``
the advantage, ``w`` the token weight, ``rho`` the ratio p_ref / p.
"""
