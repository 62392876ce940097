"""How two mathematics answers are compared.

`extraction` finds the answer; `notation`, `units`, `names` and `lists` bring it to one form;
`refusal` rejects what is not parsed. `worker_pool` runs `verifier` (math-verify and `expressions`)
in processes that can be killed. Called by `sg_rlhf.tasks.math.grading`.
"""
