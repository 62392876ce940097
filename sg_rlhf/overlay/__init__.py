"""The training run. It uses an unmodified OpenRLHF as a library.

One sub-package per process or concern. ``driver.train`` starts a run. ``controller`` is the
training loop. ``rollout`` generates, ``learner`` updates the policy, ``weight_sync`` sends its
weights to the engines. ``patches.table`` lists every upstream name that is replaced. Only
:mod:`sg_rlhf.train` imports this package. docs/architecture.md follows one training step.
"""
