"""How the policy computes log-probs: the head, packed attention, prefix sharing, rotary, Adam.

Installed by ``patches.table`` in every process that builds a model. Knows no trainer.
"""
