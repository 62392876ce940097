"""How time grows with tokens, vocabulary, group size and ranks: is it linear or better?

    python lab/bench/growth.py --out lab/bench/results/growth.json --plot docs/images/growth.png

| panel      | what is timed                                              | what grows            |
|------------|------------------------------------------------------------|-----------------------|
| responses  | the real trainer's step of the tiny model, 100 tokens each | responses             |
| length     | the same step of 32 responses                              | tokens each           |
| vocabulary | log-probs under a head without logits, and their gradients | V                     |
| group      | advantages and loss of 16 prompts, and their gradients     | responses to a prompt |
| ranks      | the recipe's step of 64 responses on each gloo rank, all   | ranks                 |

Seconds are CPU time (one thread a process), the median of some repeats. The exponent is the slope
of log seconds over log size, by least squares over the three largest sizes, where what a step costs
however small it is flattens it least: 1 is linear. Of ranks it is over those that have a core each:
more of them wait for each other's cores, which is the machine's growth and not the program's. For
the same reason all cores are busy in each of these: beside one rank others of their own do the same
(two cores at work were seen to take a tenth more time each than one).

The vocabularies that count all have more logits than are kept for the backward pass (2**23). Where
a head passes that number it makes them twice, a step of 4/3 in time, on either side of which time
is linear.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.bench import tiny_update  # isort: skip (before torch, which reads its threads once)

import torch

from lab.bench.common import at_least, exponent, provenance, rank_outputs, write
from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss

ALGORITHM = "grpo_sg"
#: Every panel's sizes, smallest first.
SIZES = {
    "responses": (16, 32, 64, 128),
    "length": (64, 128, 256, 512),
    "vocabulary": (4096, 16384, 65536, 131072),
    "group": (4, 16, 64, 256),
    "ranks": (1, 2, 4),
}
PROMPT, RESPONSE = 40, 60
LABELS = {
    "responses": "responses of 100 tokens", "length": "tokens of each of 32 responses",
    "vocabulary": "vocabulary", "group": "responses to a prompt", "ranks": "ranks",
}  # fmt: skip


def median_seconds(action: Callable[[], Any], repeats: int) -> float:
    """CPU seconds; once more before, to warm up."""
    action()
    found = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return statistics.median(found)


def steps(repeats: int) -> dict[str, dict[int, float]]:
    """The panels of the step on one engine: two micro-batches, however many responses."""
    args = tiny_update.arguments(ALGORITHM, 2 * tiny_update.MICRO_BATCH)
    update = tiny_update.TinyUpdate(args)
    trainer = update.trainer(args)

    def seconds(count: int, prompt: int, response: int) -> float:
        trainer.replay_buffer.sample_batch_size = count // 2
        given = update.responses(count, prompt, response)
        tiny_update.step(trainer, given)
        return statistics.median(tiny_update.step(trainer, given)[1] for _ in range(repeats))

    return {
        "responses": {n: seconds(n, PROMPT, RESPONSE) for n in SIZES["responses"]},
        "length": {n: seconds(32, n // 4, n - n // 4) for n in SIZES["length"]},
    }


def vocabulary(size: int, repeats: int) -> float:
    """Seconds of the log-probs and entropies of 1,024 tokens, hidden size 128."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 128, generator=generator).requires_grad_()
    weight = torch.randn(size, 128, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(size, (1024,), generator=generator)

    def once() -> None:
        hidden.grad = weight.grad = None
        log_probs, entropy = selected_log_probs(hidden, weight, targets, with_entropy=True)
        assert entropy is not None
        (log_probs.sum() + 0.01 * entropy.sum()).backward()

    return median_seconds(once, repeats)


def group(size: int, repeats: int, prompts: int = 16, tokens: int = 64) -> float:
    """Seconds of the advantages and the loss of a rollout."""
    generator = torch.Generator().manual_seed(0)
    shape = (prompts * size, tokens)
    log_probs = torch.rand(shape, generator=generator).log().requires_grad_()
    old = log_probs.detach() + 0.1 * torch.randn(shape, generator=generator)
    rewards = torch.randn(prompts, size, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)
    settings = LossSettings(ALGORITHM, dual_clip=10.0)

    def once() -> None:
        log_probs.grad = None
        advantages = group_advantages(rewards).reshape(-1, 1).expand(shape)
        policy_loss(log_probs, old, advantages, mask, settings).loss.backward()

    return median_seconds(once, repeats)


def rank(repeats: int) -> float:
    """This rank's seconds of a step, 64 responses on each of ``WORLD_SIZE`` ranks."""
    args = tiny_update.arguments(ALGORITHM, 64 * int(os.environ["WORLD_SIZE"]))
    update = tiny_update.TinyUpdate(args)
    trainer = update.trainer(args)
    given = update.responses(64, PROMPT, RESPONSE, seed=int(os.environ["RANK"]))
    tiny_update.step(trainer, given)
    return statistics.median(tiny_update.step(trainer, given)[1] for _ in range(repeats))


def ranks(count: int, repeats: int) -> float:
    """Seconds of all ranks of a job together; the mean of as many jobs as there are cores for."""
    command = [sys.executable, __file__, "--rank", "--repeats", str(repeats)]
    jobs = max(1, (os.cpu_count() or 1) // count)
    with ThreadPoolExecutor(jobs) as pool:
        of_jobs = list(pool.map(lambda _: rank_outputs(command, count), range(jobs)))
    return statistics.fmean(
        sum(float(output.splitlines()[-1]) for output in of_ranks) for of_ranks in of_jobs
    )


def counted(name: str, seconds: dict[int, float]) -> list[tuple[int, float]]:
    """Sizes and seconds that the exponent is of: two ranks at least."""
    most = max(2, os.cpu_count() or 1) if name == "ranks" else max(seconds)
    return [(size, of_size) for size, of_size in seconds.items() if size <= most]


def draw(panels: dict[str, Any], file: Path) -> None:
    """A panel of each, log-log, with a straight line of slope 1 through the last point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(2.7 * len(panels), 2.9), constrained_layout=True
    )
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        sizes, seconds = panel["sizes"], panel["seconds"]
        axis.loglog(sizes, seconds, "o-", color="#00695c", markersize=4, base=2)
        linear = [seconds[-1] * size / sizes[-1] for size in sizes]
        axis.loglog(sizes, linear, "--", color="#999999", linewidth=1, base=2)
        axis.set_title(f"{name}: exponent {panel['exponent']:.2f}", fontsize=10)
        axis.set_xlabel(LABELS[name], fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.set_xticks(sizes, [f"{s // 1024}k" if s >= 4096 else str(s) for s in sizes])
        axis.minorticks_off()
    axes[0].set_ylabel("CPU seconds (dashed: linear)", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Every panel, then the JSON and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="of each measurement [5]")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    if arguments.rank:
        print(rank(repeats))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    found: dict[str, dict[int, float]] = {
        **steps(repeats),
        "vocabulary": {n: vocabulary(n, repeats) for n in SIZES["vocabulary"]},
        "group": {n: group(n, repeats) for n in SIZES["group"]},
        "ranks": {n: ranks(n, repeats) for n in SIZES["ranks"]},
    }
    panels = {
        name: {
            "what": LABELS[name],
            "sizes": list(seconds),
            "seconds": [round(s, 4) for s in seconds.values()],
            "exponent": round(exponent(*map(list, zip(*counted(name, seconds), strict=True))), 3),
        }
        for name, seconds in found.items()
    }
    result = {
        **provenance("lab/bench/growth.py", "torch", "deepspeed", "openrlhf"),
        "panels": panels,
    }
    write(result, arguments.out)
    if arguments.plot:
        draw(panels, arguments.plot)
    print(json.dumps({name: panel["exponent"] for name, panel in panels.items()}))


if __name__ == "__main__":
    main()
