"""GRPO-SG (Sharpness-Guided GRPO, arXiv 2511.00066) as an overlay on an unmodified OpenRLHF."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # python -m sg_rlhf..., before its module is found
    from sg_rlhf.common.environment import explain_missing_packages

    explain_missing_packages()
