"""Stage f: the recipe of Qwen2.5-3B-Instruct for 3 rollouts on one GPU.

The recipe's model, loss and optimizer; its rollouts of 64 x 8 responses of up to 4,096 tokens are
cut to fit the time. Needs the model: a folder (--model DIR), or the hub in reach.

``--model random`` needs neither: a model of that shape with random weights. Its responses are as
long as allowed, its reward is a hash; memory and times are the recipe's, but it learns nothing.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from sg_rlhf.doctor.recipe import cached_model
from tests.gpu import training_run
from tests.gpu.launch import ROOT, probe
from tests.gpu.result import Job, Record, StageSkippedError

MODEL = "Qwen/Qwen2.5-3B-Instruct"
RANDOM = "random"
#: What is downloaded of a model.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
ROLLOUTS = 3
#: Prompts of a rollout, responses of a prompt, tokens of a response.
FULL, SMALL = (16, 8, 1024), (4, 4, 24)
#: GiB of a GPU, and the recipe's hardware file for one of that size.
HARDWARE = ((75, "1x80gb"), (39, "1x40gb"))


def is_here(model: str) -> bool:
    """Whether a model is a folder, or complete in the hub's cache."""
    return (Path(model) / "config.json").is_file() or cached_model(model) is not None


def download(model: str) -> None:
    """Fetch a model that is not here, before the stage's time begins.

    A failure is printed. The stage is then skipped.
    """
    if model == RANDOM or is_here(model):
        return
    print(f"f  downloading {model} first", flush=True)
    try:
        huggingface_hub.snapshot_download(model, allow_patterns=FILES)
    except Exception as error:  # whatever keeps it out of reach
        print(f"     {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)


def reachable(model: str) -> str:
    """The model, if it is here.

    Raises:
        StageSkippedError: it is not.
    """
    if not is_here(model):
        raise StageSkippedError(
            f"{model} is no folder, nor complete in the hub's cache: --model DIR names one"
        )
    return model


def hardware(gib: float) -> Path:
    """The settings for a GPU of this size.

    Raises:
        StageSkippedError: the model, its copy in vLLM and the optimizer are too large for it.
    """
    for least, name in HARDWARE:
        if gib >= least:
            return ROOT / "configs" / "hardware" / f"{name}.yaml"
    raise StageSkippedError(f"a 3B model on one GPU needs 40 GB (sg-rlhf plan), found {gib} GiB")


def run(record: Record, job: Job) -> None:
    """One run."""
    training_run.environment(job)
    # In a process of its own: this one takes nothing of the GPU.
    sizes = [hardware(probe()["gpu"]["memory_gib"])] if job.on_cuda else []
    run_dir = job.scratch / "run"
    if job.model == RANDOM:
        model = str(training_run.random_model(job, MODEL))
    else:
        model = reachable(job.model or MODEL)
    prompts, responses, tokens = SMALL if job.small else FULL
    data = training_run.puzzles(job, "3-4" if job.on_cuda else "2-3", 3 * prompts)
    samples = prompts * responses
    overrides = [
        *training_run.NO_EVALUATION,
        f"actor.model_name_or_path={model}", f"data.prompt_dataset={data}",
        f"data.max_samples={ROLLOUTS * prompts}", "train.num_episodes=1",
        f"rollout.batch_size={prompts}", f"rollout.n_samples_per_prompt={responses}",
        f"rollout.max_new_tokens={tokens}", f"train.batch_size={samples // 2}",
    ]  # fmt: skip
    if job.model == RANDOM:
        overrides.append(f"reward.remote_url={training_run.HASH_REWARD}")
    configs = [ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"]
    if job.on_cuda:
        configs = [ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml", *sizes]
        overrides.append("data.max_len=2048")
    else:
        overrides += ["rollout.micro_batch_size=8", "train.micro_batch_size=4"]
    with training_run.peak_memory(record, job):
        training_run.train(configs, [*overrides, *job.overrides], run_dir)
    # The rounding of bfloat16 matters more where all logits are alike, as of random weights.
    mismatch = (2 if job.model == RANDOM else 1) * training_run.TOLERANCE
    training_run.check_run(record, run_dir, ROLLOUTS, mismatch)
