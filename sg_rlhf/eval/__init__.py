"""Evaluation on the paper's benchmarks: ``python -m sg_rlhf.eval.run``."""
