"""Evaluation on the paper's benchmarks: ``python -m eval.run``."""

import sg_rlhf  # noqa: F401  (explains what `python -m eval.run` lacks)
