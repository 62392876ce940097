"""What a prompt that stands once for its responses saves: an update step with and without.

    python lab/bench/shared_prompts.py --out lab/bench/results/shared_prompts.json

The real trainer's optimizer step of the tiny model on 32 responses in one micro-batch, eight to a
prompt, by turns with ``sg.share_prompts`` on and off in one process with one thread. Seconds are
its CPU time, medians of the turns. ``tokens`` is the share of a packed row that is left.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from lab.bench import tiny_update  # isort: skip (before torch, which reads its threads once)

from lab.bench.common import at_least, provenance, write
from sg_rlhf.overlay.settings import worker_settings

RESPONSES, GROUP = 32, 8
#: Name -> tokens of a prompt and of a response. The first are those of the tiny recipe's puzzles.
CASES = {
    "puzzles": (33, 70),
    "long prompts": (300, 60),
    "long responses": (60, 300),
}


def compare(prompt: int, response: int, turns: int) -> dict[str, Any]:
    """One case."""
    args = tiny_update.arguments("grpo_sg", RESPONSES)
    update = tiny_update.TinyUpdate(args)
    responses = update.responses(RESPONSES, prompt, response, group=GROUP)
    trainer = update.trainer(args)
    seconds: dict[str, list[float]] = {"1": [], "0": []}
    for turn in range(turns + 1):
        for shared in list(seconds) if turn % 2 else list(seconds)[::-1]:
            settings = worker_settings.WorkerSettings(share_prompts=shared == "1")
            os.environ[worker_settings.VARIABLE] = settings.to_json()
            taken = tiny_update.step(trainer, responses)[1]
            if turn:  # the first ones warm up
                seconds[shared].append(taken)
    ratios = [on / off for on, off in zip(seconds["1"], seconds["0"], strict=True)]
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "tokens": round((prompt / GROUP + response) / (prompt + response), 3),
        "seconds": round(statistics.median(seconds["1"]), 3),
        "seconds_apart": round(statistics.median(seconds["0"]), 3),
        "time_ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    """Every case, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--turns", type=at_least(1), default=10, help="of each [10]")
    arguments = parser.parse_args()
    cases = {}
    for name, (prompt, response) in CASES.items():
        cases[name] = compare(prompt, response, arguments.turns)
        print(name, cases[name], flush=True)
    result = {
        **provenance("lab/bench/shared_prompts.py", "torch", "deepspeed", "openrlhf"),
        "responses": RESPONSES,
        "to_a_prompt": GROUP,
        "cases": cases,
    }
    write(result, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
