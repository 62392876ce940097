"""Print a run on one screen: scores before and after training, and where its files are.

Also writes ``reward.png``, ``grad_norm.png`` and ``summary.json`` into the run directory.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io import strict_json
from sg_rlhf.data_io.model_folder import merge_command
from sg_rlhf.report import speed
from sg_rlhf.report.evaluations import held_out_accuracy, held_out_sets, set_names
from sg_rlhf.report.runs import Row, Run, RunError, curve, grouped, number, read_run
from sg_rlhf.run_dir import alerts, jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete

PLOTS = ("reward.png", "grad_norm.png")


def _read(run_dir: Path) -> Run:
    run = read_run(run_dir)
    if not run.steps:
        raise RunError(f"{run_dir}: no optimizer step in {jsonl_log.OPTIMIZER_STEPS} yet")
    return run


def figures_of(run: Run) -> dict[str, Any]:
    """The figures of a run that was read; NaN for what it does not log."""
    metrics, rows = run.metrics, run.steps
    norms = _values(rows, "actor_grad_norm")
    rewards = _values(metrics, "rollout/reward_mean")
    window = max(1, min(5, len(rewards) // 2))
    summary: dict[str, Any] = {
        "rollouts": run.rollouts,
        "optimizer_steps": len(rows),
        "reward_first": _of(statistics.fmean, rewards[:window]),
        "reward_last": _of(statistics.fmean, rewards[-window:]),
        "reward_window": window,
        "grad_norm_mean": _of(statistics.fmean, norms),
        "grad_norm_std": _of(statistics.pstdev, norms),
        "grad_norm_max": _of(max, norms),
        "weight_mean": _of(statistics.fmean, _values(rows, "sg/weight_mean")),
        "zeroed_pos": _of(statistics.fmean, _values(rows, "sg/zeroed_pos")),
        "seconds_per_rollout": _of(statistics.median, _values(metrics, "timing/step_total")),
    }
    if warning := alerts.nothing_learned(run.metrics):
        summary["warning"] = warning
    return {
        **summary, **speed.speed_of(run), **_not_finite(run), **_memory(run), **_held_out(run),
    }  # fmt: skip


def _values(rows: Sequence[Row], key: str) -> list[float]:
    """Those that are numbers; an older version may not have logged any."""
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _of(figure: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    """NaN of no values."""
    return figure(values) if values else math.nan


def _not_finite(run: Run) -> dict[str, Any]:
    """What sg.on_nonfinite=skip has skipped and left out, where it did."""
    found = {
        name: int(sum(value for _, value in curve(run.metrics, f"nonfinite/{name}")))
        for name in ("skipped_steps", "samples")
    }
    if not any(found.values()):
        return {}
    return {f"nonfinite_{name}": count for name, count in found.items()}


def _memory(run: Run) -> dict[str, Any]:
    """The largest GPU memory that was measured."""
    found: dict[str, Any] = {}
    for metric in ("memory/device_used_gib", "memory/peak_allocated_gib"):
        if values := [value for _, value in curve(run.metrics, metric)]:
            found[metric.removeprefix("memory/")] = max(values)
    return found


def _held_out(run: Run) -> dict[str, Any]:
    points = held_out_accuracy(run)
    if not points:
        return {}
    summary: dict[str, Any] = {}
    for name, point in (("before", points[0]), ("after", points[-1])):
        summary[f"accuracy_{name}"] = point.accuracy
        summary[f"accuracy_{name}_ci95"] = point.half_width
        summary[f"held_out_step_{name}"] = point.step
    summary["held_out_prompts"] = points[-1].prompts
    if set_names(run):
        summary["held_out_sets"] = held_out_sets(run)
    return summary


def render(summary: dict[str, Any], run_dir: Path) -> str:
    """The summary as text for a terminal; "-" for what the run did not log."""

    def shown(key: str, form: str) -> str:
        value = summary[key]
        return format(value, form) if math.isfinite(value) else "-"

    lines = [
        f"{run_dir.name}: {summary['rollouts']} rollouts, "
        f"{summary['optimizer_steps']} optimizer steps"
    ]
    if "accuracy_before" in summary:
        lines.append(
            f"  held-out accuracy   {summary['accuracy_before']:.3f} "
            f"+- {shown('accuracy_before_ci95', '.3f')}  ->  {summary['accuracy_after']:.3f} "
            f"+- {shown('accuracy_after_ci95', '.3f')}   "
            f"({shown('held_out_prompts', '.0f')} prompts, 95 % intervals)"
        )
    if sets := summary.get("held_out_sets"):
        lines.append(f"                      {'mean of ' * (len(sets) > 1)}{' and '.join(sets)}")
    lines += [
        f"  training reward     {shown('reward_first', '+.3f')}  ->  "
        f"{shown('reward_last', '+.3f')}   (first and last {summary['reward_window']} rollouts)",
        f"  gradient norm       mean {shown('grad_norm_mean', '.3f')}, std "
        f"{shown('grad_norm_std', '.3f')}, max {shown('grad_norm_max', '.3f')}",
        f"  token weight        mean {shown('weight_mean', '.3f')}; "
        f"{shown('zeroed_pos', '.1%')} of positive tokens zeroed by the clip",
        f"  time                {shown('seconds_per_rollout', '.1f')} s per rollout (median)",
        *speed.lines(summary),
    ]
    if "nonfinite_samples" in summary:
        lines.append(
            f"  not finite          {summary['nonfinite_skipped_steps']} optimizer steps skipped, "
            f"{summary['nonfinite_samples']} responses left out ({jsonl_log.NONFINITE})"
        )
    if "device_used_gib" in summary:
        used = f"{summary['device_used_gib']:.1f} GiB of a GPU at most"
        lines.append(f"  memory              {used}")
    lines.append(f"  run directory       {run_dir}")
    plots = [file for file in (run_dir / name for name in PLOTS) if file.is_file()]
    lines += [f"  {'' if i else 'plots':<20}{file}" for i, file in enumerate(plots)]
    if final_checkpoint_complete(run_dir):
        folder = final_checkpoint(run_dir)
        merge = merge_command(folder)
        what = "Hugging Face folder; vLLM loads it" if merge is None else "LoRA adapters alone"
        lines.append(f"  checkpoint          {folder}  ({what})")
        if merge is not None:
            lines.append(f"  to evaluate it      {merge}")
    if "warning" in summary:
        lines.append(summary["warning"])
    return "\n".join(lines)


def text(run_dir: Path) -> str:
    """The summary of a run as text.

    Raises:
        RunError: the directory holds no run.
    """
    return render(figures_of(_read(run_dir)), run_dir)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 if the directory holds no run."""
    parser = OneLineParser(prog="sg-rlhf summary", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    run_dir = parser.parse_args(argv).run_dir
    try:
        run = _read(run_dir)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from sg_rlhf.report import catalogue, figures

    summary, groups = figures_of(run), grouped([run])
    name = run_dir.resolve().name
    titles = (name, f"{name}: gradient norm of every optimizer step")
    drawn = (figures.reward_and_accuracy, figures.grad_norm)
    for file, title, draw in zip(PLOTS, titles, drawn, strict=True):
        catalogue.write(draw, groups, run_dir / file, title)
    write_whole(run_dir / "summary.json", strict_json.dumps(summary, indent=2) + "\n")
    print(render(summary, run_dir))
    return 0
