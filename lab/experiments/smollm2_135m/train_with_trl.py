"""Train SmolLM2-135M-Instruct on the tutorial's sums with TRL and the loss of sg_rlhf.

    make .cache/integrations/made
    sg-rlhf data model smollm2-135m --out data/smollm2-135m
    sg-rlhf data arithmetic --out data/arithmetic
    PYTHONPATH=. .cache/integrations/bin/python -m lab.experiments.smollm2_135m.train_with_trl

As configs/arithmetic/grpo_smollm2-135m_cpu.yaml: the same start, prompts in the same order,
rewards, batches and optimizer. TRL generates, scores and updates. Writes a line per rollout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.integrations.trl import GRPOSGTrainer
from sg_rlhf.tasks.arithmetic.domain import grade

HERE = Path(__file__).parent
SEED, PROMPTS, GROUP, MICRO_BATCH = 42, 8, 8, 16


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"prompt": row["input"], "answer": row["answer"]} for row in rows]


def in_our_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The order in which our controller reads an epoch with train.seed=42."""
    torch.manual_seed(SEED)
    return [rows[i] for i in torch.utils.data.RandomSampler(rows)]


class Rows(TrainerCallback):
    """Writes a row per rollout, with the names of our metrics."""

    def __init__(self, out: Path, run: str) -> None:
        self.out, self.run = out, run
        self.began = time.monotonic()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:  # the summary at the end
            return
        now = time.monotonic()
        figures = {
            "rollout/accuracy": logs["reward"],
            "rollout/frac_reward_zero_std": logs["frac_reward_zero_std"],
            "rollout/truncated_rate": logs["completions/clipped_ratio"],
            "rollout/response_length_mean": logs["completions/mean_length"],
            "actor_grad_norm": logs["grad_norm"],
            "sg/weight_mean": logs["sg/weight_mean"],
            "timing/step_total": now - self.began,
        }
        self.began = now
        row = {"run": self.run, "global_step": state.global_step}
        row |= {key: round(float(value), 5) for key, value in figures.items()}
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [grade(*pair).reward for pair in zip(texts, answer, strict=True)]


def main() -> None:
    """Train, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="data/smollm2-135m", help="folder of the model")
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic"))
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--weighting", default="uniform", help="uniform is GRPO")
    parser.add_argument("--out", type=Path, default=HERE / "trl.jsonl")
    args = parser.parse_args()
    run = f"TRL, {args.weighting}"
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_steps=args.rollouts, logging_steps=1, disable_tqdm=True, seed=SEED,
            shuffle_dataset=False, gradient_checkpointing=False,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=PROMPTS * GROUP // MICRO_BATCH, num_generations=GROUP,
            temperature=1.0, max_completion_length=16,
            learning_rate=1e-5, lr_scheduler_type="constant", weight_decay=0.01,
            max_grad_norm=1.0, epsilon=0.2, epsilon_high=0.24, beta=0.0,
        )  # fmt: skip
        trainer = GRPOSGTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            args=config, reward_funcs=reward, callbacks=[Rows(args.out, run)],
            train_dataset=Dataset.from_list(in_our_order(rows_of(args.data / "train.jsonl"))),
            weighting=make_weighting(args.weighting), dual_clip=10.0,
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
