"""Stage e: the whole pipeline on one GPU with a Qwen2 of 0.5B whose weights are random.

vLLM samples, sleeps, a reward grades, the reference scores, ZeRO-3 trains, the weights go back to
the engine, and after each sync engine and trainer must agree on 16 rollouts' log-probs. Nothing is
downloaded: the model's shape is in sg_rlhf/plan, its weights are drawn, its tokenizer is made.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu import random_qwen2, training_run
from tests.gpu.launch import ROOT
from tests.gpu.result import Job, Record

ROLLOUTS = 3
#: Prompts of a rollout, responses of a prompt, tokens of a response.
FULL, SMALL = (16, 8, 256), (4, 4, 24)


def run(record: Record, job: Job) -> None:
    """One run of three rollouts with two optimizer steps each."""
    model, arguments = settings(job)
    run_dir = job.scratch / "run"
    with training_run.peak_memory(record, job):
        training_run.train(*arguments, run_dir)
    training_run.check_run(record, run_dir, ROLLOUTS)
    check_tensors(record, model, training_run.trained_model(run_dir))


def settings(job: Job) -> tuple[Path, tuple[list[Path], list[str]]]:
    """The model's folder; the recipes and the keys of the run."""
    training_run.environment(job)
    model = training_run.random_model(job, random_qwen2.PUBLISHED)
    prompts, responses, tokens = SMALL if job.small else FULL
    data = training_run.puzzles(job, "2-3", 4 * prompts)
    samples = prompts * responses
    overrides = [
        *training_run.NO_EVALUATION,
        f"actor.model_name_or_path={model}", f"data.prompt_dataset={data}",
        f"reward.remote_url={training_run.HASH_REWARD}",
        f"data.max_samples={ROLLOUTS * prompts}", "train.num_episodes=1",
        f"rollout.batch_size={prompts}", f"rollout.n_samples_per_prompt={responses}",
        f"rollout.max_new_tokens={tokens}", f"train.batch_size={samples // 2}",
        # Few and large: ZeRO-3's work in Python is the same for a small micro-batch.
        f"rollout.micro_batch_size={samples // 4}", f"train.micro_batch_size={samples // 4}",
        # bfloat16 weights of .02 do not move by steps of 1e-6.
        "actor.adam.lr=1e-4",
    ]  # fmt: skip
    configs = [ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"]
    if job.on_cuda:
        configs = [ROOT / "configs" / "kk" / "grpo_sg_1xgpu.yaml"]
        # As on eight GPUs: the optimizer's states leave while the engine samples.
        overrides += [
            f"data.max_len={1024 if job.small else 2048}",
            "ds.adam_offload=false", "ds.enable_sleep=true",
            "vllm.enforce_eager=true", "vllm.gpu_memory_utilization=0.4",
        ]  # fmt: skip
    return model, (configs, [*overrides, *job.overrides])


def check_tensors(record: Record, before: Path, after: Path, frozen: str = "norm") -> None:
    """Training has changed every tensor, but for those with ``frozen`` (a pattern) in their name.

    A norm's weight is 1, and the next number in bfloat16 is farther away than these steps go.
    """
    same, total = training_run.unchanged_tensors(before, after)
    record.figure("tensors", {"all": total, "unchanged": len(same)})
    wrong = [name for name in same if not re.search(frozen, name)]
    record.check("every tensor that trains has changed", total > 0 and not wrong, wrong[:5])
