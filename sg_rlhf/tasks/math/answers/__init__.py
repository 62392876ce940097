"""How two mathematics answers are compared: a table of rules, and the code that applies it.

`compare` lists every rule. `sg_rlhf.tasks.math.grading` calls it.
"""
