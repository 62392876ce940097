"""Check that the start models suit the study, before any reinforcement learning.

    python -m lab.experiments.forks.gate --json lab/experiments/forks/gates.json

Prints a table, and ends with status 1 if a start model is outside a range of `GATES`. Everything is
at temperature 1, on problems that no demonstration has.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from lab.experiments.forks.corpora import GOOD, WORDS, R, WarmStart
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.tasks.domain import load
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.sets.arithmetic import Problem, generate
from sg_rlhf.tiny.sampling import sample_responses

PROBLEMS, GROUP, SEED = 200, 8, 5
#: Weights of p below this differ from U = 1.4 (tau 9, Eq. 19).
VARIES = 0.3272
#: figure: (corpora, lowest, highest)
GATES = {
    "accuracy": ("rd", 0.25, 0.45),
    "share_sure": ("rd", 0.50, 1.0),
    "share_low": ("rd", 0.05, 0.10),
    "mass_low": ("rd", 0.60, 1.0),
    "effect_of_words": ("r", -0.03, 0.03),
    "effect_of_words ": ("d", 0.30, 1.0),
    "right_minus_other_corpus": ("rd", -0.05, 0.05),
}


def on_policy(
    model: PreTrainedModel, tokenizer: Tokenizer, items: list[Problem]
) -> dict[str, float]:
    """Accuracy and the tokens' probabilities of GROUP responses per problem.

    share_sure: tokens with p > .99. share_low: tokens with p < .327, whose weight is below U: L
    below .122, and between for p in (.122, .327). mass_low, mass_words: the share of
    sum |A| (1 - p) that the latter and the words have. A token's gradient at the logits has about
    this size.
    """
    domain = load(R.tiny)
    assert domain is not None
    prompts = [
        tokenizer(prompt_of(item.text), add_special_tokens=False)["input_ids"] for item in items
    ]
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    responses = sample_responses(model, repeated, max_new_tokens=96, temperature=1.0, seed=SEED)
    right = np.array(
        [
            domain.grade(tokenizer.decode(r), items[i // GROUP]).correct
            for i, r in enumerate(responses)
        ],
        dtype=np.float64,
    ).reshape(-1, GROUP)
    advantages = (right - right.mean(1, keepdims=True)) / (
        right.std(1, ddof=1, keepdims=True) + 1e-9
    )
    words = set(tokenizer.convert_tokens_to_ids(list(WORDS)))
    p, size, is_word = [], [], []
    for i, prompt in enumerate(prompts):
        group = responses[i * GROUP : (i + 1) * GROUP]
        p += token_probs(model, prompt, group)
        for response, advantage in zip(group, advantages[i], strict=True):
            size += [abs(advantage)] * len(response)
            is_word += [token in words for token in response]
    probs, forked = np.array(p), np.array(is_word)
    mass = np.array(size) * (1 - probs)
    weights = make_weighting("grpo_sg").curve(torch.tensor(probs)).numpy()
    return {
        "accuracy": right.mean(), "tokens_per_response": len(probs) / len(responses),
        "share_sure": (probs > 0.99).mean(), "share_low": (probs < VARIES).mean(),
        "mass_low": mass[probs < VARIES].sum() / mass.sum(),
        "mass_words": mass[forked].sum() / mass.sum(),
        "weight_mean": weights.mean(), "weight_std": weights.std(),
    }  # fmt: skip


@torch.no_grad()
def token_probs(
    model: PreTrainedModel, prompt: list[int], responses: list[list[int]]
) -> list[float]:
    """Probability of each token of the responses to one prompt, one after the other."""
    longest = max(map(len, responses))
    # Attention is causal: tokens behind a response have no effect on it.
    ids = torch.tensor([[*prompt, *r, *[0] * (longest - len(r))] for r in responses])
    probs = model(ids).logits[:, len(prompt) - 1 : -1].double().softmax(-1)
    chosen = probs.gather(2, ids[:, len(prompt) :, None])[..., 0]
    return [float(p) for row, r in zip(chosen, responses, strict=True) for p in row[: len(r)]]


@torch.no_grad()
def right_after(
    model: PreTrainedModel, tokenizer: Tokenizer, items: list[Problem]
) -> NDArray[np.float64]:
    """P(the first column's outcome is right | word), mean over problems; one entry per word."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    clean, found = WarmStart(decides=False, mean=0.0), []
    for item in items:
        text = clean.response(item, random.Random(SEED))
        first = "|".join(WORDS)
        match = re.match(rf"(\n.*?: )({first})(.*? = )(\d+)(, | so )", text)
        assert match is not None, text
        # What follows the outcome belongs to it: 1 is also the beginning of 12.
        head, tail, outcome = (
            ids(prompt_of(item.text) + match[1]),
            ids(match[3]),
            ids(match[4] + match[5]),
        )
        rows = torch.tensor([[*head, *ids(word), *tail, *outcome] for word in WORDS])
        logits = model(rows).logits[:, -len(outcome) - 1 : -1].double().log_softmax(-1)
        target = torch.tensor(outcome).expand(len(WORDS), -1)[..., None]
        found.append(logits.gather(2, target)[..., 0].sum(1).exp().numpy())
    return np.mean(found, axis=0)


def measure(folder: Path) -> dict[str, Any]:
    """The figures of one start model.

    right_good, right_bad: P(right) after these words; effect_of_words: their difference; right:
    their mean.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    items = generate(PROBLEMS, SEED, held_out=True)
    right = right_after(model, tokenizer, items)
    good, bad = right[:GOOD].mean(), right[GOOD:].mean()
    figures = {
        **on_policy(model, tokenizer, items),
        "right_good": good, "right_bad": bad, "effect_of_words": good - bad, "right": right.mean(),
    }  # fmt: skip
    return {
        "sha256": sha256_of(folder / "model.safetensors"),
        **{name: round(float(value), 4) for name, value in figures.items()},
    }


def failures(starts: dict[str, dict[str, Any]]) -> list[str]:
    """One line per gate that a start model fails. Names are r0, d0 and so on."""
    lines = []
    for name, figures in starts.items():
        for gate, (corpora, low, high) in GATES.items():
            value = figures[gate.strip()]
            if name[0] in corpora and not low <= value <= high:
                lines.append(f"{name}: {gate.strip()} is {value}, expected {low} to {high}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 if a gate fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--starts", type=Path, default=Path("runs/forks/starts"), help="folder of the start models"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="their seeds [0 1 2]"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    starts = {
        f"{c}{seed}": measure(args.starts / f"{c}{seed}") for seed in args.seeds for c in "rd"
    }
    for name, figures in starts.items():
        other = starts[("d" if name[0] == "r" else "r") + name[1:]]
        figures["right_minus_other_corpus"] = round(figures["right"] - other["right"], 4)
    keys = [key for key in next(iter(starts.values())) if key != "sha256"]
    print("| start |", " | ".join(keys), "|\n|---|" + "--:|" * len(keys))
    for name, figures in starts.items():
        print(f"| {name} |", " | ".join(f"{figures[key]:.3f}" for key in keys), "|")
    failed = failures(starts)
    if args.json:
        args.json.write_text(json.dumps({"starts": starts, "failed": failed}, indent=1) + "\n")
    print("\n".join(failed) or "every start model passes every gate")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
