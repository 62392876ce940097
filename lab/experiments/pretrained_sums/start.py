"""The gates of the study: what the start model can do, and how far each arm turns its update.

    python -m lab.experiments.pretrained_sums.start

Writes start.json: accuracy and groups with a signal over 64 prompts x 8 responses, and each arm's
cosine with GRPO's gradient and AdamW step, mean over 4 minibatches of 8 prompts x 8 responses.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from lab.experiments.forks.start_gradients import ARMS, compared, rounded
from lab.measure.checkpoint import load_model, load_tokenizer
from lab.measure.fixed_batch import read_data
from lab.measure.rollouts import Sampling, load_reward, sample_batch
from lab.study.plan import load_study
from lab.study.runner import Runner
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io import model_folder

HERE = Path(__file__).parent
MODEL, RUNS, REWARD = Path("data/smollm2-135m"), Path("runs/pretrained_sums"), "domain:arithmetic"
PROMPTS, GROUP, MAX_TOKENS = 64, 8, 24


def ability(data: Path) -> dict[str, float]:
    """Accuracy of the start model's responses, and the share of prompts with right and wrong."""
    model = load_model(str(MODEL), torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(str(MODEL))
    settings, reward = Sampling(PROMPTS, GROUP, 1.0, MAX_TOKENS), load_reward(REWARD)
    batch = sample_batch(data, read_data(data), str(MODEL), model, tokenizer, settings, reward)
    groups = [batch.rows[i : i + GROUP] for i in range(0, len(batch.rows), GROUP)]
    return {
        "accuracy": statistics.fmean(row.reward == 1 for row in batch.rows),
        "groups_with_signal": statistics.fmean(any(r.advantage for r in g) for g in groups),
        "tokens": batch.tokens / len(batch.rows),
    }


def main() -> int:
    """Exit status 0."""
    study = load_study(HERE / "study.yaml")
    Runner(study, HERE, RUNS, jobs=1).make_data()
    arms = {arm: ARMS[arm] for arm in study.file.variants}
    more = ["--batches", "4", "--warm-up", "4", "--max-new-tokens", str(MAX_TOKENS)]
    found: dict[str, Any] = {
        "model": model_folder.source(MODEL),
        **ability(RUNS / "data" / "sums" / "train.jsonl"),
        "arms": rounded(compared(MODEL, RUNS, arms, "sums", REWARD, more)),
    }
    write_whole(HERE / "start.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
