"""Evaluation on the paper's benchmarks: ``python -m eval.run``."""
