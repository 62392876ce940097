"""GRPO-SG in other trainers: one module for each, which needs that trainer and PyTorch alone.

docs/other_trainers.md shows their use.
"""

#: Token statistics that an adapter reports, as ``sg/NAME``.
METRICS = ("weight_mean", "clip_ratio", "zeroed_pos", "zeroed_neg")
