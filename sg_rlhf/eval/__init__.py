"""Evaluation on the paper's benchmarks: ``sg-rlhf eval``. Bad input raises `EvalError`."""
