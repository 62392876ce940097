"""From graded samples to scores with intervals, `results.json`, tables and comparisons.

Called by `sg_rlhf.eval.run` and `rescore`.
"""
