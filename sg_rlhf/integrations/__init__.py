"""GRPO-SG in other trainers: one module for each, which needs that trainer and PyTorch alone.

docs/other_trainers.md shows their use.
"""
