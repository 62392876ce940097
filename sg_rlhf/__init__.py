"""GRPO-SG (Sharpness-Guided GRPO, arXiv 2511.00066) as an overlay on an unmodified OpenRLHF."""

__version__ = "0.1.0"
