"""Case pretrained: SmolLM2-135M-Instruct trains on sums, with its tokenizer and chat template."""

from __future__ import annotations

from sg_rlhf.run_dir import jsonl_log
from tests.gpu import training_run
from tests.gpu.launch import ROOT
from tests.gpu.random_pipeline import check_tensors
from tests.gpu.result import Job, Record

ROLLOUTS = 2
#: Prompts of a rollout, responses of a prompt.
PROMPTS, RESPONSES = 2, 4


def run(record: Record, job: Job) -> None:
    """The recipe of one GPU with small batches."""
    training_run.environment(job)
    model, data, run_dir = job.scratch / "smollm2", job.scratch / "sums", job.scratch / "run"
    training_run.call("-m", "sg_rlhf", "data", "model", "smollm2-135m", "--out", str(model))
    training_run.call(
        "-m", "sg_rlhf", "data", "arithmetic", "--out", str(data),
        "--generate", f"count={ROLLOUTS * PROMPTS}", "test_count=4",
    )  # fmt: skip
    samples = PROMPTS * RESPONSES
    training_run.train(
        [ROOT / "configs" / "arithmetic" / "grpo_smollm2-135m.yaml"],
        [
            *training_run.NO_EVALUATION,
            f"actor.model_name_or_path={model}", f"data.prompt_dataset={data / 'train.jsonl'}",
            "train.num_episodes=1", f"rollout.batch_size={PROMPTS}",
            f"rollout.n_samples_per_prompt={RESPONSES}", f"train.batch_size={samples}",
            f"sg.samples_per_step={samples}",
            f"rollout.micro_batch_size={samples // 2}", f"train.micro_batch_size={samples // 2}",
            "vllm.enforce_eager=true", "vllm.gpu_memory_utilization=0.2",
            # Triton's interpreter samples the whole vocabulary for each sequence of the warm-up.
            f"vllm.engine_args={{max_num_seqs: {samples}}}",
            *job.overrides,
        ],
        run_dir,
    )  # fmt: skip
    training_run.check_run(record, run_dir, ROLLOUTS)
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    record.figure("accuracy", [row["rollout/accuracy"] for row in rows])
    responses = [row["response"] for row in jsonl_log.read(run_dir / jsonl_log.SAMPLES)]
    ended = sum(response.endswith("<|im_end|>") for response in responses)
    record.check("most responses end", 2 * ended > len(responses), ended)
    # Steps of 1e-5 move few weights in bfloat16, but some of every tensor that is not a norm.
    check_tensors(record, model, training_run.trained_model(run_dir))
