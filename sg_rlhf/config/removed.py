"""Recipe keys and command-line options that are gone: why, and what to do instead.

A recipe or command that names one is refused with this line.
"""

from __future__ import annotations

#: The limits of searches that were keys, with the values of every run (a test compares them).
SEARCH_LIMITS: dict[str, float] = {
    "max_query_chars": 8192, "timeout_s": 60.0, "retries": 3, "outage_s": 60.0, "backoff_s": 0.25,
    "max_connections": 8, "max_batch": 64, "max_failure_rate": 0.1, "failure_window": 200,
    "min_searches": 16,
}  # fmt: skip
#: Key -> reason and remedy.
KEYS: dict[str, str] = {
    "sg.cluster_wait": "a run always waits up to 1,800 s for the machines of a cluster; the same "
    "command waits again",
    "sg.engine_start_timeout": "it is six times sg.engine_timeout, and at least 1,800 s; set "
    "sg.engine_timeout",
    "sg.grace_seconds": "it is always 240; remove the key",
    "sg.sync_bucket_mb": "it is 64 over gloo and 512 over nccl; remove the key",
    "sg.sync_check_every": "the first weight sync is checked, and sg/mismatch_* shows every "
    "rollout; remove the key",
    "sg.sync_timeout": "it is 120 s and 10 more per GB of weights; remove the key",
    "sg.weight_sync": "weights are always sent in buckets; remove the key",
    "sg.batch_invariant": "no result used vLLM's batch-invariant kernels; set "
    "VLLM_BATCH_INVARIANT=1 in the environment",
    "sg.batches": "samples are always balanced by length over ranks; remove the key",
    "sg.check_trained": "every run checks its first optimizer step; freeze tensors that should not "
    "be trained",
    "sg.contradicting_labels": "rows with the same prompt and another label are always kept, with "
    "a remark; remove the key",
    "sg.engine_log_probs": "the engine always returns them; remove the key",
    "sg.eval_at_end": "a run with held-out prompts always evaluates at its end; for none set "
    "eval.dataset=null",
    "sg.max_nonfinite": "it is always 3; remove the key",
    "sg.rotary_fp32": "rotary frequencies are always float32, as in vLLM; remove the key",
    "sg.skip_old_log_probs": "the pass is always skipped where the update gives the same numbers; "
    "remove the key",
    "sg.truncated_sampling": "rollout.top_p below 1 is always refused; set rollout.top_p=1",
    "sg.uncorrected": "samples of an older policy always need a correction; set sg.correction=tis",
    "sg.dump_rollout": "no command reads the file; samples.jsonl has tokens, log-probs and weights "
    "of sg.samples_per_step responses",
    **{
        f"sg.search.{name}": f"it is always {value:g}; remove the key"
        for name, value in SEARCH_LIMITS.items()
    },
}

#: Key -> the value that every run has now, and former defaults. A recipe with one of them still
#: loads, such as that of a preregistered study or of an earlier run.
ACCEPTED: dict[str, tuple[object, ...]] = {
    "sg.batches": ("balanced",),
    "sg.check_trained": (True,),
    "sg.eval_at_end": (True,),
    "sg.rotary_fp32": (True,),
    "sg.skip_old_log_probs": (True,),
    "sg.sync_check_every": (0,),
    "sg.weight_sync": ("buckets",),
    **{f"sg.search.{name}": (value,) for name, value in SEARCH_LIMITS.items()},
    "sg.search.timeout_s": (SEARCH_LIMITS["timeout_s"], 10.0),
}

#: Option of `sg-rlhf train` -> reason and remedy.
TRAIN_OPTIONS: dict[str, str] = {
    "--print": "`sg-rlhf launch sbatch|kuberay|skypilot` prints job files",
    **dict.fromkeys(
        ("--image", "--time", "--partition", "--account"),
        "it is an option of `sg-rlhf launch sbatch|kuberay|skypilot`",
    ),
    "--replay": "one update says little; `python -m lab.measure minibatch-gradients` compares "
    "weightings on the same minibatches",
}
