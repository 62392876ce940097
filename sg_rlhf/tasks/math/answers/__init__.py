"""How two mathematics answers are compared.

`boxed` finds the answer; `normalize`, `units`, `symbols` and `lists` bring it to one form; `guards`
rejects what is not parsed. `pool` runs `worker` (math-verify and `symbolic`) in processes that can
be killed. Called by `sg_rlhf.tasks.math.grading`.
"""
