"""Registers GRPO-SG in an unmodified OpenRLHF, by subclasses and replaced names.

One sub-package per process or concern. ``driver`` starts a run; ``controller`` holds the loop;
``rollout``, ``learner`` and ``weight_sync`` are the engines, the ranks and the way between them.
``patches.table`` lists every upstream name that is replaced. Only :mod:`sg_rlhf.train` imports it.
"""
