"""How two mathematics answers are compared: a table of rules, and the code that applies it.

`boxed` finds the answer. `rewrites`, `units` and `normalize` bring it to one spelling; `guards`
rejects what is not parsed. `pool` runs `worker` in processes that can be killed: `lists` splits
the answer, `symbols` and `symbolic` (math-verify and sympy) compare its values, `numeric` by their
values at points. `table` lists every rule. Called by `sg_rlhf.tasks.math.grading`.
"""
