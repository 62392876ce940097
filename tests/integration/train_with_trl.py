"""GRPO-SG in TRL: the tiny Knights & Knaves model on a CPU.

    make .cache/integrations/made
    PYTHONPATH=. .cache/integrations/bin/python tests/integration/train_with_trl.py [STEPS [REWARD]]

As configs/kk/grpo_sg_tiny_cpu.yaml: 16 prompts x 8 responses a rollout, two optimizer steps each.
With a REWARD every response gets that one, and the loss has no KL.
Prints one line of JSON for each rollout, of its first optimizer step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.data_io.records import mixed
from sg_rlhf.integrations.trl import GRPOSGTrainer
from sg_rlhf.tasks.kk.data import generate_splits, to_records
from sg_rlhf.tasks.kk.grading import score

MODEL = Path(__file__).parents[2] / "sg_rlhf" / "tiny" / "kk_tiny"
KEPT = (
    "reward", "grad_norm", "kl", "entropy", "completions/mean_length", "sg/weight_mean",
    "sg/clip_ratio", "sg/zeroed_pos",
)  # fmt: skip


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [score(*pair).reward for pair in zip(completions, answer, strict=True)]


def main(steps: int, constant: float | None = None) -> None:
    def same(completions: list[str], **_: Any) -> list[float]:
        return [float(constant or 0.0)] * len(completions)

    puzzles = mixed(generate_splits((2, 3), 160, 0, seed=0)[0], "kk order")
    rows = [{"prompt": x["input"], "answer": x["answer"]} for x in to_records(puzzles)]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_steps=steps, logging_steps=1, disable_tqdm=True, seed=0,
            per_device_train_batch_size=64, steps_per_generation=2, num_generations=8,
            temperature=0.7, max_completion_length=256,
            learning_rate=2e-4, lr_scheduler_type="constant", weight_decay=0.01,
            epsilon=0.2, epsilon_high=0.24, beta=0.001 if constant is None else 0.0,
        )  # fmt: skip
        trainer = GRPOSGTrainer(
            model=str(MODEL), args=args, reward_funcs=reward if constant is None else same,
            train_dataset=Dataset.from_list(rows),
            weighting=make_weighting("grpo_sg", {"upper": 1.2}), dual_clip=10.0,
        )  # fmt: skip
        trainer.train()
    for line in trainer.state.log_history:
        if "reward" in line:
            print(
                json.dumps({"step": line["step"]} | {key: line[key] for key in KEPT if key in line})
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10, *map(float, sys.argv[2:]))
