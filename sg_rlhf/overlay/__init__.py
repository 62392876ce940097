"""Registers GRPO-SG in an unmodified OpenRLHF: subclasses and names, no copied line."""
