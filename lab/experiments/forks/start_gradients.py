"""How far each arm turns the gradient of a start model, and the model's greedy accuracy.

    python -m lab.experiments.forks.start_gradients r0

Compares every arm with GRPO on the same 8 minibatches of 8 prompts x 8 responses: cosine of the
gradients and of AdamW's steps. `zero_low` removes the tokens with p < .327. It is no arm of the
study: it shows what part of the gradient these tokens have. Writes start_gradients.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.experiments.forks.corpora import R
from lab.experiments.forks.gate import PROBLEMS, SEED
from lab.measure import minibatch_gradients
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.tasks.domain import load
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.sets.arithmetic import generate
from sg_rlhf.tiny.sampling import sample_responses

HERE = Path(__file__).parent
RUNS = Path("runs/forks")
OUT = HERE / "start_gradients.json"
CONFIGS = Path("configs/algorithms").resolve()
#: Arm -> recipe, and its weighting's settings where the study changes them.
Arms = dict[str, tuple[str, dict[str, Any]]]
ARMS: Arms = {
    "grpo": ("grpo", {}),
    "sg_outside": ("grpo_sg_outside", {}),
    "sg_outside_dose": ("grpo_sg_outside", {"lower": 0.5, "upper": 1.5}),
    "reshape_reversed": ("reshape_reversed", {"c": 0.5}),
    "sg_inside": ("grpo_sg", {}),
    "mask_only": ("mask_only", {}),
    "zero_low": ("uniform", {"type": "lab.experiments.forks_part2.zero_low:ZeroLow"}),
}  # fmt: skip


def greedy_accuracy(folder: Path) -> float:
    """On the held-out problems of the gate."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    domain, items = load(R.tiny), generate(PROBLEMS, SEED, held_out=True)
    assert domain is not None
    prompts = [tokenizer(prompt_of(i.text), add_special_tokens=False)["input_ids"] for i in items]
    responses = sample_responses(model, prompts, max_new_tokens=96, temperature=0.0)
    right = [
        domain.grade(tokenizer.decode(response), item).correct
        for response, item in zip(responses, items, strict=True)
    ]
    return sum(right) / len(right)


def compared(
    folder: Path,
    runs: Path,
    arms: Arms,
    data: str = "arithmetic",
    reward: str = "module:lab.experiments.forks.reward",
    more: Sequence[str] = ("--batches", "8", "--warm-up", "8", "--threads", "1"),
) -> list[dict[str, Any]]:
    """Each arm's gradient and AdamW step compared with the first arm's, at this start model.

    Args:
        runs: the folder of the study's runs; its data set ``data`` is answered.
        more: further arguments of the measurement.
    """
    scratch = runs / "start_gradients"
    scratch.mkdir(parents=True, exist_ok=True)
    recipes = []
    for arm, (recipe, weighting) in arms.items():
        recipes.append(scratch / f"{arm}.yaml")
        settings = {"extends": str(CONFIGS / f"{recipe}.yaml"), "sg": {"weighting": weighting}}
        recipes[-1].write_text(
            json.dumps(settings if weighting else {"extends": settings["extends"]})
        )
    figures = scratch / "figures.json"
    failed = minibatch_gradients.main([
        "--model", str(folder), "--data", str(runs / "data" / data / "train.jsonl"),
        "--reward", reward, "--json", str(figures), "--prompts", "8", "--group", "8", *more,
        "--algorithm", *map(str, recipes),
    ])  # fmt: skip
    if failed:
        raise SystemExit(failed)
    (found,) = json.loads(figures.read_text())["models"]
    return list(found["algorithms"])


def rounded(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Arm -> cosine with the first arm's gradient and AdamW step, and the gradient's size."""
    return {
        row["algorithm"]: {
            "cosine": round(row["cosine"], 4),
            "step_cosine": round(row["update"]["cosine"], 4),
            "size": round(row["size"], 4),
        }
        for row in rows
    }


def measured(folder: Path) -> dict[str, Any]:
    """The figures of one start model."""
    return {
        "sha256": sha256_of(folder / "model.safetensors"),
        "greedy_accuracy": greedy_accuracy(folder), "algorithms": compared(folder, RUNS, ARMS),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("starts", nargs="+", help="start models, such as r0 and d0")
    args = parser.parse_args(argv)
    found = {name: measured(RUNS / "starts" / name) for name in args.starts}
    write_whole(OUT, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
