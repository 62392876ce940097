"""Run directories with invented numbers, shaped like those that the trainer writes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from sg_rlhf.config import load_config
from sg_rlhf.overlay.controller.evaluation import combine
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.weight_versions import staleness

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "configs" / "kk"
SIZES = (2, 3, 4, 5, 6, 7)
WORDS = (
    " knight", " knave", " is", " a", " so", " then", " therefore", " if", " must", " be", "\n",
    ".", " Zoey", " Oliver", " Avery", " says", " lies", " truth", "<answer>", "</answer>", ",",
)  # fmt: skip

#: Of a rollout, by part as the trainer writes them.
SECONDS = {
    "generation": 40.0, "engines_wake": 2.0, "longest_response": 12.0, "make_experience": 8.0,
    "old_log_probs": 3.0, "reference_log_probs": 4.5, "hand_over": 0.3, "ppo_train": 30.0,
    "update_old_log_probs": 0.0, "update_forward": 9.0, "update_backward": 18.0, "broadcast": 3.0,
    "sync_check": 0.2, "logging": 0.2, "other": 0.3, "step_total": 82.0, "evaluation": 0.0,
    "checkpoint": 5.0,
}  # fmt: skip


def write_config(run_dir: Path, recipe: str = "grpo_sg_tiny_cpu.yaml", *overrides: str) -> None:
    """The resolved recipe, as training writes it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = load_config(RECIPES / recipe, [f"sg.run_dir={run_dir}", *overrides])
    (run_dir / "config.yaml").write_text(config.to_yaml())


def sample(step: int, rng: random.Random, tokens: int = 30) -> dict[str, Any]:
    """A row of samples.jsonl."""
    pieces = [rng.choice(WORDS) for _ in range(tokens)]
    correct = float(rng.random() < 0.3 + 0.001 * step)
    return {
        "global_step": step,
        "prompt": f"A very special island, puzzle {rng.randrange(40)}.",
        "label": "(1) Zoey is a knight",
        "response": "".join(pieces),
        "reward": 3.0 if correct else rng.choice([-0.5, -1.0, -3.0]),
        "correct": correct,
        "advantage": round(rng.choice([1.0, -1.0, 0.0]) * rng.random(), 4),
        "tokens": pieces,
        # Most tokens are certain, some are not: as in a model that reasons.
        "log_probs": [
            round(math.log(rng.betavariate(4, 0.4) * 0.999 + 0.0009), 5) for _ in range(tokens)
        ],
    }


def evaluation(step: int, rng: random.Random) -> dict[str, float]:
    """A row of eval/eval.jsonl."""
    row: dict[str, float] = {"global_step": step, "eval_num_prompts": 600.0}
    accuracies = []
    for size in SIZES:
        accuracy = max(0.0, min(1.0, 0.9 - 0.1 * size + 0.001 * step + rng.gauss(0, 0.02)))
        accuracies.append(accuracy)
        row[f"eval_kk_{size}ppl_accuracy"] = accuracy
        row[f"eval_kk_{size}ppl_accuracy_ci95"] = 0.08
    row["eval_accuracy"] = sum(accuracies) / len(accuracies)
    row["eval_accuracy_ci95"] = 0.03
    return row


def eval_sets(folder: Path) -> tuple[str, ...]:
    """Overrides for the sets of a study: held-out puzzles, training prompts, larger puzzles."""
    datasets = {"held_out": "test.jsonl", "train": "train.jsonl", "larger": "larger.jsonl"}
    sets = [
        {"name": name, "dataset": str(folder / file), "temperature": 0.7}
        for name, file in datasets.items()
    ]
    return (
        "eval.dataset=null",
        f"data.prompt_dataset={folder / 'train.jsonl'}",
        f"sg.eval_sets={json.dumps(sets)}",
    )


def evaluation_of_sets(step: int, rng: random.Random) -> dict[str, float]:
    """A row of eval/eval.jsonl with the sets of ``eval_sets``."""
    by_set = {}
    for name, level in (("held_out", 0.4), ("train", 0.7), ("larger", 0.1)):
        sizes = {f"kk_{n}ppl": level + 0.01 * step + rng.gauss(0, 0.02) for n in (2, 3)}
        by_set[name] = {
            "eval_accuracy": sum(sizes.values()) / 2,
            "eval_accuracy_ci95": 0.03 + level / 10,
            "eval_num_prompts": 100 + 100 * level,
        }
        for size, accuracy in sizes.items() if name != "larger" else ():
            by_set[name] |= {
                f"eval_{size}_accuracy": accuracy,
                f"eval_{size}_accuracy_ci95": 0.05,
                f"eval_{size}_num_prompts": 75.0,
            }
    return {"global_step": step, **combine(by_set)}


def write_run(
    run_dir: Path,
    *,
    rollouts: int = 12,
    samples_per_step: int = 2,
    tokens: int = 30,
    seed: int = 0,
    histograms: bool = True,
    recipe: str = "grpo_sg_tiny_cpu.yaml",
    overrides: tuple[str, ...] = (),
    sets: bool = False,
) -> Path:
    """A whole run directory, with the ``eval_sets`` of its parent if ``sets``; returns it."""
    rng = random.Random(seed)
    overrides = (*overrides, *(eval_sets(run_dir.parent) if sets else ()))
    write_config(run_dir, recipe, f"train.seed={seed}", *overrides)
    metrics, steps, samples = [], [], []
    for step in range(1, rollouts + 1):
        done = step / rollouts
        metrics.append(
            {
                "global_step": step,
                "rollout/reward_mean": -1 + 3 * done + rng.gauss(0, 0.2),
                "rollout/accuracy": 0.2 + 0.5 * done + rng.gauss(0, 0.02),
                "rollout/response_length_mean": 400 + 300 * done + rng.gauss(0, 20),
                "rollout/truncated_rate": 0.02,
                "sg/n_mismatch_tokens": 1000.0,
                "sg/mismatch_kl_k3": 1e-4 * (1 + done),
                "sg/mismatch_max": 0.1 + 0.1 * done,
                **staleness([([[0, min(step, 2)], [300, 2]], 400)], 2, 2),
                **{f"timing/{part}": seconds for part, seconds in SECONDS.items()},
            }
        )
        for half in (0, 1):
            norm = 0.2 + 0.02 * rng.random() + (1.5 if (step, half) == (rollouts - 2, 1) else 0)
            steps.append(
                {
                    "global_step": step,
                    "optimizer_step": 2 * step - 1 + half,
                    "actor_grad_norm": norm,
                    "kl": 0.01 * done,
                    "entropy_loss": 0.5 - 0.3 * done,
                    "sg/n_tokens": 1000.0,
                    "sg/weight_mean": 1.2 - 0.02 * rng.random(),
                    "sg/weight_std": 0.02,
                    "sg/zeroed_pos": 0.1 * rng.random(),
                    "sg/zeroed_pos_at_ratio1": 0.0,
                    "sg/w_one_minus_p_mean": 0.3 - 0.1 * done,
                    **(_histograms(rng) if histograms else {}),
                }
            )
        samples += [sample(step, rng, tokens) for _ in range(samples_per_step)]
    jsonl_log.append(run_dir / jsonl_log.METRICS, metrics)
    jsonl_log.append(run_dir / jsonl_log.OPTIMIZER_STEPS, steps)
    jsonl_log.append(run_dir / jsonl_log.SAMPLES, samples)
    jsonl_log.append(
        run_dir / jsonl_log.EVALUATIONS,
        [
            (evaluation_of_sets if sets else evaluation)(step, rng)
            for step in sorted({0, rollouts // 2, rollouts})
        ],
    )
    return run_dir


def _histograms(rng: random.Random) -> dict[str, Any]:
    return {
        "sg/prob_hist": [5 + rng.randrange(5) for _ in range(19)] + [800],
        "sg/weight_q05": 1.1,
        "sg/weight_q95": 1.2,
    }


def write_details(run_dir: Path) -> None:
    """Makes each rollout's two samples one group of four, with what an update says of each token.

    The groups of every third rollout have no spread, and every fourth has an environment's text.
    """
    rng = random.Random(7)
    path = run_dir / jsonl_log.SAMPLES
    rows = jsonl_log.read(path)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        step = first["global_step"]
        flat = step % 3 == 0
        rewards = [1.0] * 4 if flat else [3.0, -1.0, -1.0, -3.0]
        for row, reward in zip((first, second), rewards, strict=False):
            log_probs = row["log_probs"]
            row |= {
                "prompt": first["prompt"], "group_rewards": rewards, "reward": reward,
                "advantage": 0.0 if flat else (1.0 if reward > 0 else -0.5),
                "entropies": [round(0.5 - v * rng.random(), 5) for v in log_probs],
                "engine_log_probs": [round(v + rng.gauss(0, 0.01), 5) for v in log_probs],
                "update_log_probs": [round(min(0, v + rng.gauss(0, 0.2)), 5) for v in log_probs],
            }  # fmt: skip
            if step % 4 == 0:
                row["environment"] = [[10, "\n<information>Doc 1</information>\n"]]
    path.unlink()
    jsonl_log.append(path, rows)


#: What a model may write to break a page that does not escape it.
HOSTILE = (
    "</script><script>window.__pwned=1</script>",
    "<!--<script>",
    "<img src=x onerror='window.__pwned=2'>",
    "\u2028\u2029",
    "\ud800",
    "\x00\x1b[31m",
    "\u202egnp.exe",
    "{{ 7 * 7 }}",
    "$x^{2$ \\frac{",
    "javascript:window.__pwned=3",
    "]]>&amp;\"'",
)


def write_hostile_samples(run_dir: Path) -> None:
    """Adds samples whose every text is hostile."""
    rows = []
    for step in range(1, 7):
        row = sample(step, random.Random(step), 4)
        row |= {name: " ".join(HOSTILE) for name in ("prompt", "label")}
        row |= {"tokens": list(HOSTILE), "log_probs": [-0.5 * i for i in range(len(HOSTILE))]}
        rows.append({**row, "response": "".join(HOSTILE), "dialogue": "<b>" + "".join(HOSTILE)})
    jsonl_log.append(run_dir / jsonl_log.SAMPLES, rows)
