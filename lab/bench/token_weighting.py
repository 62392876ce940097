"""What weighting tokens costs beside the same step with every weight 1: time and memory.

    python lab/bench/token_weighting.py --out lab/bench/results/token_weighting.json

Whole steps: the real trainer's optimizer step on the tiny model, which is the hardest case, as its
forward and backward pass are the cheapest. Each weighting has a process of its own, in which its
steps and those with weight 1 (``uniform``) take turns on the same engine and responses. Seconds are
CPU time of that process, which has one thread; memory is the most that torch had allocated at one
time in a step, counted allocation by allocation.

The loss alone, forward and backward as the trainer calls it, for every weighting: what it takes
more than with weight 1, as a share of the step. The paper (arXiv 2511.00066) reports 1.054 times
the time and 1.001 times the memory of a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.bench import tiny_update  # isort: skip (before torch, which reads its threads once)

import torch
from openrlhf.models.loss import PolicyLoss

from lab.bench.common import at_least, peak_bytes, provenance, write
from sg_rlhf.overlay.learner.policy_loss import (
    PolicyOutput,
    RolloutConstants,
    loss_batch,
    loss_settings,
    micro_batch_loss,
)
from sg_rlhf.overlay.learner.replay_buffer import Denominators

RESPONSES, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 40, 60
BASE = "uniform"
#: Recipes of configs/algorithms whose steps are timed; each does work that the others do not.
STEPS = ("grpo_sg", "grpo_sg_normalized", "random", "top_entropy")


def weighted() -> list[str]:
    """Every recipe of configs/algorithms that weights tokens, and the one with weight 1."""
    found = [BASE]
    for path in sorted((tiny_update.CONFIGS / "algorithms").glob("*.yaml")):
        args = tiny_update.arguments(path.stem, RESPONSES)
        if args.sg.weighting["type"] != BASE:
            found.append(path.stem)
    return found


def steps(algorithm: str, turns: int) -> dict[str, Any]:
    """Steps of this weighting and of weight 1 by turns, on one engine."""
    given = {name: tiny_update.arguments(name, RESPONSES) for name in (algorithm, BASE)}
    update = tiny_update.TinyUpdate(given[BASE])
    responses = update.responses(RESPONSES, PROMPT_TOKENS, RESPONSE_TOKENS)
    trainers = {name: update.trainer(args) for name, args in given.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        order = list(trainers) if turn % 2 else list(trainers)[::-1]
        # The weighting's own first: it may have hooks that expect a step to have been.
        for name in list(trainers) if turn == 0 else order:
            taken = tiny_update.step(trainers[name], responses)[1]
            if turn:  # the first ones warm up
                seconds[name].append(taken)
    ratios = [a / b for a, b in zip(seconds[algorithm], seconds[BASE], strict=True)]
    bytes_of = {
        name: peak_bytes(functools.partial(tiny_update.step, trainer, responses))
        for name, trainer in trainers.items()
    }
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "seconds": round(statistics.median(seconds[algorithm]), 3),
        "seconds_with_weight_1": round(statistics.median(seconds[BASE]), 3),
        "time_ratio": round(statistics.median(ratios), 4),
        "time_ratio_quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "memory_mib": round(bytes_of[algorithm] / 2**20, 2),
        "memory_ratio": round(bytes_of[algorithm] / bytes_of[BASE], 4),
    }


class Loss:
    """The loss of one micro-batch as the trainer computes it, forward and backward."""

    def __init__(self, algorithm: str) -> None:
        args = tiny_update.arguments(algorithm, RESPONSES)
        actor = args.actor
        stock = PolicyLoss(
            clip_eps_low=actor.eps_clip_low_high[0],
            clip_eps_high=actor.eps_clip_low_high[1],
            dual_clip=actor.dual_clip,
            policy_loss_type=actor.policy_loss_type,
        )
        self.settings = loss_settings(args, stock)
        generator = torch.Generator().manual_seed(0)
        batch, length = args.train.micro_batch_size, PROMPT_TOKENS + RESPONSE_TOKENS
        p = torch.rand(batch, length - 1, generator=generator)
        self.log_probs = p.log().requires_grad_()
        old = (self.log_probs.detach() + 0.1 * torch.randn(p.shape, generator=generator)).clamp(
            max=0
        )
        ids = torch.randint(5, 500, (batch, length), generator=generator)
        mask = (torch.arange(length - 1) >= PROMPT_TOKENS - 1).expand(batch, -1)
        self.experience = argparse.Namespace(
            sequences=ids,
            attention_mask=torch.ones_like(ids),
            action_mask=mask,
            action_log_probs=old,
            base_action_log_probs=old,
            advantages=torch.randn(batch, 1, generator=generator).expand_as(p).contiguous(),
            rollout_log_probs=old,
        )
        self.denominators = Denominators(1, mask.sum(), len(mask))
        self.entropy = torch.rand(p.shape, generator=generator)

    def __call__(self) -> None:
        self.log_probs.grad = None
        batch = loss_batch(self.experience, self.settings.weighting, self.denominators)
        policy = PolicyOutput(self.log_probs, self.entropy)
        rollout = RolloutConstants(kl_coef=0.001, entropy_threshold=0.5)
        micro_batch_loss(batch, policy, self.settings, rollout).loss.backward()


def losses(rounds: int, step_seconds: float) -> dict[str, dict[str, float]]:
    """Every weighting's loss by turns: milliseconds a step, and its share of the step."""
    of = {name: Loss(name) for name in weighted()}
    seconds: dict[str, list[float]] = {name: [] for name in of}
    for turn in range(rounds + 3):
        for name, loss in of.items():
            started = time.process_time()
            loss()
            if turn >= 3:
                seconds[name].append(time.process_time() - started)
    micro_batches = RESPONSES // tiny_update.MICRO_BATCH
    taken = {name: micro_batches * statistics.median(found) for name, found in seconds.items()}
    return {
        name: {
            "ms": round(1000 * found, 3),
            "more_than_weight_1_of_a_step": round((found - taken[BASE]) / step_seconds, 5),
        }
        for name, found in taken.items()
    }


def main() -> None:
    """A process for each weighting's steps, then the losses and the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--turns", type=at_least(2), default=12, help="steps of each [12]")
    parser.add_argument("--rounds", type=at_least(1), default=200, help="of the losses alone [200]")
    parser.add_argument("--steps", default=",".join(STEPS), help="recipes whose steps are timed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(steps(arguments.one, arguments.turns)))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    for name in arguments.steps.split(","):
        if not (tiny_update.CONFIGS / "algorithms" / f"{name}.yaml").is_file():
            parser.error(f"--steps {name}: no recipe of configs/algorithms")
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.steps.split(","):
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, "--turns", str(arguments.turns)],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    step_seconds = statistics.median(row["seconds_with_weight_1"] for row in found.values())
    alone = losses(arguments.rounds, step_seconds)
    slowest = max(alone, key=lambda name: alone[name]["ms"])
    result = {
        **provenance("lab/bench/token_weighting.py", "torch", "deepspeed", "openrlhf"),
        "step": {
            "model": "kk_tiny", "responses": RESPONSES,
            "tokens": RESPONSES * (PROMPT_TOKENS + RESPONSE_TOKENS), "turns": arguments.turns,
        },
        "steps": found,
        "loss_alone": alone,
        "slowest_loss": {
            "weighting": slowest,
            "step_time_ratio": round(1 + alone[slowest]["more_than_weight_1_of_a_step"], 5),
        },
    }  # fmt: skip
    write(result, arguments.out)
    print(f"slowest loss: {result['slowest_loss']}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
