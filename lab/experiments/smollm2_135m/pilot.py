"""Train SmolLM2-135M with GRPO and GRPO-SG on some seeds, and draw their curves.

    python -m lab.experiments.smollm2_135m.pilot --model data/smollm2-135m   # trains; resumable
    python -m lab.experiments.smollm2_135m.pilot                             # table and picture

A pilot: few seeds show the size of an effect that a study could look for, and decide nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy import stats

from sg_rlhf.common import figures

HERE = Path(__file__).parent
ARMS = {
    "grpo": ("GRPO", "#404040"),
    "grpo_sg": ("GRPO-SG inside the clip", "#00798c"),
    "grpo_sg_outside": ("GRPO-SG outside the clip", "#d1495b"),
}
RECIPE = "configs/arithmetic/grpo_smollm2-135m_cpu.yaml"
#: Without a KL term in every arm: a term of weight 0.001 would need a reference model.
SETTINGS = (
    "algo.kl.use_loss=false", "algo.kl.init_coef=0", "eval.steps=4", "eval.n_samples_per_prompt=4",
    "ckpt.save_steps=4",
)  # fmt: skip
KEPT = (
    "rollout/accuracy", "rollout/frac_reward_zero_std", "rollout/truncated_rate",
    "rollout/response_length_mean", "actor_grad_norm", "entropy_loss", "sg/prob_mean",
    "sg/weight_mean", "sg/weight_std", "sg/zeroed_pos", "sg/mismatch_max", "timing/generation",
    "timing/update_forward", "timing/update_backward", "timing/broadcast", "timing/sync_check",
    "timing/step_total",
)  # fmt: skip


def train(model: str, seeds: list[int], out: Path, file: Path) -> None:
    """Run every arm and seed that is not finished; a run's rows replace its former ones in file."""
    data = out / "data"
    if not (data / "test.jsonl").exists():
        sizes = ["count=64", "test_count=70"]
        command(["data", "arithmetic", "--out", str(data), "--generate", *sizes])
    for seed in seeds:
        for arm in ARMS:
            run = out / f"{arm}_s{seed}"
            command([
                "train", "--config", RECIPE, "--algorithm", arm, "--run-dir", str(run), *SETTINGS,
                f"actor.model_name_or_path={model}", f"data.prompt_dataset={data}/train.jsonl",
                f"eval.dataset={data}/test.jsonl", f"train.seed={seed}",
            ])  # fmt: skip
            others = [row for row in read(file) if (row["arm"], row["seed"]) != (arm, seed)]
            rows = sorted([*others, *rows_of(run, arm, seed)], key=lambda row: row["seed"])
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def command(arguments: list[str]) -> None:
    """Run ``sg-rlhf``."""
    subprocess.run([sys.executable, "-m", "sg_rlhf", *arguments], check=True)


def rows_of(run: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """A row per evaluation and per rollout of a run."""
    rows = []
    for line in (run / "eval" / "eval.jsonl").read_text().splitlines():
        found = json.loads(line)
        rows.append({
            "arm": arm, "seed": seed, "rollout": found["global_step"],
            "eval_accuracy": round(found["eval_accuracy"], 5),
            "eval_accuracy_ci95": round(found["eval_accuracy_ci95"], 5),
        })  # fmt: skip
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        kept = {key: round(found[key], 5) for key in KEPT if key in found}
        rows.append({"arm": arm, "seed": seed, "rollout": found["global_step"], **kept})
    return rows


def curve(rows: list[dict[str, Any]], arm: str, key: str) -> dict[int, dict[int, float]]:
    """Rollout -> seed -> value."""
    values: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["arm"] == arm and key in row:
            values.setdefault(row["rollout"], {})[row["seed"]] = row[key]
    return values


def interval(values: list[float]) -> str:
    """Mean and half of its 95 % interval over the seeds (Student's t); without one for one seed."""
    if len(values) == 1:
        return f"{values[0]:+.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.3f} ± {half:.3f}"


def table(rows: list[dict[str, Any]]) -> str:
    """A line per arm: held-out accuracy, its difference to GRPO, what the weights did."""
    lines = [
        "| arm | held-out accuracy at the end | minus GRPO, pairs of a seed | mean of the training "
        "rollouts | weight, mean and sd | positive tokens without gradient | gradient norm |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    ends = {}
    for arm, (name, _) in ARMS.items():
        ends[arm] = list(curve(rows, arm, "eval_accuracy").values())[-1]

        def mean(key: str, arm: str = arm) -> float:
            return statistics.mean(row[key] for row in rows if row["arm"] == arm and key in row)

        pairs = [ends[arm][seed] - ends["grpo"][seed] for seed in ends[arm]]
        lines.append(
            f"| {name} | {interval(list(ends[arm].values())).lstrip('+')} "
            f"| {interval(pairs) if arm != 'grpo' else ''} | {mean('rollout/accuracy'):.3f} "
            f"| {mean('sg/weight_mean'):.2f}, {mean('sg/weight_std'):.2f} "
            f"| {mean('sg/zeroed_pos'):.0%} | {mean('actor_grad_norm'):.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], to: Path) -> None:
    """Thick lines are means over the seeds, thin ones single seeds.

    The intervals of one seed are over the held-out sums.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"rollout/accuracy": "training rollouts (64)", "eval_accuracy": "held-out sums (280)"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for arm, (name, colour) in ARMS.items():
            values = curve(rows, arm, key)
            for seed in next(iter(values.values())):
                single = [values[rollout].get(seed) for rollout in values]
                axis.plot(list(values), single, color=colour, alpha=0.3, linewidth=0.8)
            means = [statistics.mean(values[rollout].values()) for rollout in values]
            axis.plot(list(values), means, "o-", color=colour, label=name, markersize=4)
            if key == "eval_accuracy" and len(next(iter(values.values()))) == 1:
                halves = [next(iter(v.values())) for v in curve(rows, arm, f"{key}_ci95").values()]
                at = [rollout + 0.12 * (list(ARMS).index(arm) - 1) for rollout in values]
                axis.errorbar(at, means, halves, fmt="none", ecolor=colour, capsize=2, alpha=0.6)
        axis.set_title(f"SmolLM2-135M, {title}", fontsize=10)
        axis.set_xlabel("rollout")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy")
    axes[1].legend(fontsize=8, loc="lower right")
    figures.save(figure, to, dpi=150)


def main() -> None:
    """Train if there is a model to train; then table and picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of sg-rlhf data model smollm2-135m; trains it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2_pilot"), metavar="DIR")
    args = parser.parse_args()
    file = HERE / "pilot.jsonl"
    if args.model:
        train(args.model, args.seeds, args.out, file)
    rows = read(file)
    draw(rows, HERE / "pilot.png")
    print(table(rows))


if __name__ == "__main__":
    main()
