"""What the per-token statistics cost beside the update that they describe.

    python bench/diagnostics.py --out bench/results/diagnostics.json

The tiny model is the hardest case there is: its update is the cheapest, and the statistics cost the
same whatever the model. Each round is one optimizer step of a recipe's size (two micro-batches of
32 responses), forward, backward and AdamW, with the time inside the statistics taken apart: the
sums of the loss and of the KL for each micro-batch, and the figures of the row at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from arguments import as_json
from machine import machine, processor
from transformers import AutoModelForCausalLM

from sg_rlhf.algo import policy_loss
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics, kl_statistics
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
MICRO_BATCHES, RESPONSES = 2, 32


class Stopwatch:
    """Seconds spent inside the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def optimizer_step(
    model: Any, optimizer: torch.optim.Optimizer, prompt: int, response: int, watch: Stopwatch
) -> float:
    """One step on random responses; its seconds."""
    cfg = GrpoSG(upper=1.2)
    length = prompt + response
    mask = (torch.arange(length - 1) >= prompt - 1).expand(RESPONSES, -1)
    collected = TokenStatistics.zeros()
    started = time.perf_counter()
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(5, 500, (RESPONSES, length))
        logits = model(ids).logits[:, :-1].float()
        log_probs = torch.gather(logits.log_softmax(-1), -1, ids[:, 1:, None])[..., 0]
        old = log_probs.detach() + 0.05 * torch.randn_like(log_probs)
        advantages = torch.randn(RESPONSES, 1).expand_as(log_probs)
        terms = policy_loss.policy_loss_terms(
            log_probs, old, advantages, mask, cfg, 0.2, 0.24, 10.0,
            batch_num_tokens=mask.sum() * MICRO_BATCHES,
        )  # fmt: skip
        kl = kl_estimate(log_probs, old, terms.weights_BT, "wk3")
        collected += terms.statistics + watch(kl_statistics)(kl, mask)
        (terms.loss + 0.001 * (kl * mask).sum() / mask.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    watch(collected.metrics)()
    watch(collected.histogram("prob_hist").tolist)()
    return time.perf_counter() - started


def measure(prompt: int, response: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    watch = Stopwatch()
    original = policy_loss.token_statistics
    policy_loss.token_statistics = watch(original)
    steps, shares = [], []
    try:
        for index in range(rounds + 1):
            watch.seconds = 0.0
            seconds = optimizer_step(model, optimizer, prompt, response, watch)
            if index:  # the first one warms up
                steps.append(seconds)
                shares.append(watch.seconds / (seconds - watch.seconds))
    finally:
        policy_loss.token_statistics = original
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "update_seconds": statistics.median(steps),
        "statistics_share": statistics.median(shares),
        "statistics_share_range": [min(shares), max(shares)],
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = [measure(40, response, arguments.rounds) for response in (60, 256)]
    result = {
        "command": f"python bench/diagnostics.py --rounds {arguments.rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gb": machine()["memory_gb"],
            "torch_threads": torch.get_num_threads(),
        },
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        "model": f"kk_tiny, {RESPONSES} responses x {MICRO_BATCHES} micro-batches, float32",
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_json(result))
    for row in results:
        print(
            f"{row['response_tokens']} response tokens: {100 * row['statistics_share']:.2f} % "
            f"of an update of {row['update_seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
