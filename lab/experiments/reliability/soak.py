"""A run of 500 rollouts without a GPU: does any of its processes grow?

    python lab/experiments/reliability/soak.py --out FILE --plot docs/images/soak.png

The tiny recipe in rollouts of 16 responses, with a checkpoint every 50. Every few seconds: the
memory of each process (its proportional share, as they are forked from one), its open files and
threads. The slope is a straight line through the last half of the rollouts, in KiB a
rollout. About a second a rollout on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lab.bench.common import ROOT, provenance, write
from sg_rlhf.run_dir import jsonl_log

RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
PROMPTS, GROUP, OF_AN_EPOCH = 4, 4, 8
#: What is before it is warming up.
BEGIN = 0.5
SECONDS_BETWEEN = 5.0
#: Parts of a process's title or arguments, and what it is to a user; the first that fits.
ROLES = {
    "EngineCore": "engine's core",
    "RolloutActor": "rollout engine",
    "PolicyModelActor": "policy",
    "ReferenceModelActor": "reference",
    "Controller": "controller",
    "gcs_server": "Ray: gcs_server",
    "raylet": "Ray: raylet",
    "sg_rlhf.train": "driver",
}
OTHER = "the rest"


def role(process: psutil.Process) -> str:
    """What a process is in a run."""
    words = " ".join(process.cmdline())
    if " -m ray" in words or ("/ray/" in words and "worker" not in words):
        words = words.split("--")[0]
    return next((name for part, name in ROLES.items() if part in words), OTHER)


def reading(driver: psutil.Process) -> dict[str, dict[str, float]]:
    """MiB, open files and threads, by role."""
    found: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: {"mib": 0.0, "files": 0, "threads": 0, "processes": 0}
    )
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            of = role(process)
            values = {
                "mib": process.memory_full_info().pss / 2**20,
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "processes": 1,
            }
            for name, value in values.items():
                found[of][name] += value
    return dict(found)


def watch(
    command: list[str], run_dir: Path, log: Path, total: int
) -> tuple[list[dict[str, Any]], int]:
    """Run a command and read its processes; the readings and its exit status."""
    readings = []
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN)
            rollouts = len(jsonl_log.read(run_dir / jsonl_log.METRICS))
            if rollouts == total:
                break  # its processes end one by one, and what they shared goes to the others
            if rollouts and process.poll() is None:
                readings.append({"rollouts": rollouts, "roles": reading(driver)})
                print(f"\r{rollouts} rollouts", end="", file=sys.stderr, flush=True)
        status = process.wait()
    return readings, status


def slopes(readings: list[dict[str, Any]], rollouts: int) -> dict[str, dict[str, float]]:
    """Of each role, by least squares after the warm-up: KiB, files and threads a rollout."""
    late = [r for r in readings if r["rollouts"] >= BEGIN * rollouts]
    roles = sorted({name for r in late for name in r["roles"]})
    found: dict[str, dict[str, float]] = {}
    for name in [*roles, "all"]:
        found[name] = {}
        for unit, factor in (("mib", 1024.0), ("files", 1.0), ("threads", 1.0)):
            ys = [sum(v[unit] for n, v in r["roles"].items() if name in (n, "all")) for r in late]
            slope = np.polyfit([r["rollouts"] for r in late], ys, 1)[0] * factor
            found[name]["kib" if unit == "mib" else unit] = round(float(slope), 4)
            found[name][f"last_{unit}"] = round(float(ys[-1]), 1)
    return found


def plot(readings: list[dict[str, Any]], found: dict[str, dict[str, float]], file: Path) -> None:
    """Memory over rollouts, a line for each role, with its slope in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in sorted(found, key=lambda n: -found[n]["last_mib"]):
        if name == "all" or found[name]["last_mib"] < 1:
            continue
        points = [(r["rollouts"], r["roles"][name]["mib"]) for r in readings if name in r["roles"]]
        label = f"{name}: {found[name]['kib']:+.1f} KiB a rollout"
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    axes.set(xlabel="rollouts", ylabel="memory, MiB (proportional share)", ylim=(0, None))
    axes.set_title("Memory of a run's processes")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python lab/experiments/reliability/soak.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--plot", type=Path, help="a picture, PNG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [
                sys.executable, "-m", "sg_rlhf", "data", "kk", "--out", str(folder / "data"),
                "--generate", "people=2-3", "per_size=16", "test_per_size=4", "seed=0",
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run_dir, log = folder / "run", folder / "log.txt"
        command = [
            sys.executable, "-m", "sg_rlhf.train", "--config", str(RECIPE),
            "--run-dir", str(run_dir),
            f"data.prompt_dataset={folder / 'data' / 'train.jsonl'}",
            f"eval.dataset={folder / 'data' / 'test.jsonl'}",
            f"data.max_samples={OF_AN_EPOCH}", f"rollout.batch_size={PROMPTS}",
            f"rollout.n_samples_per_prompt={GROUP}", "rollout.micro_batch_size=8",
            "rollout.max_new_tokens=48", "train.batch_size=8", "train.micro_batch_size=4",
            f"train.num_episodes={args.rollouts * PROMPTS // OF_AN_EPOCH}",
            "ckpt.save_steps=50", "eval.steps=100",
        ]  # fmt: skip
        started = time.time()
        readings, status = watch(command, run_dir, log, args.rollouts)
        if status:
            print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
            return status
        seconds = time.time() - started
        rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
        bytes_of_run = sum(p.stat().st_size for p in (run_dir / "logs").rglob("*") if p.is_file())
    found = slopes(readings, len(rows))
    halves = [rows[len(rows) // 5 : len(rows) // 2], rows[len(rows) // 2 :]]
    times = [sum(r["timing/step_total"] for r in half) / len(half) for half in halves]
    result = {
        **provenance("lab/experiments/reliability/soak.py", "torch", "ray", "deepspeed"),
        "rollouts": len(rows), "seconds": round(seconds),
        "seconds_a_rollout": {"to_the_half": round(times[0], 3), "after_it": round(times[1], 3)},
        "logs_bytes_a_rollout": round(bytes_of_run / len(rows)),
        "slopes": found, "readings": readings,
    }  # fmt: skip
    write(result, args.out)
    if args.plot:
        plot(readings, found, args.plot)
    for name, values in found.items():
        print(f"{name:16} {values['last_mib']:8.1f} MiB {values['kib']:+8.2f} KiB a rollout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
