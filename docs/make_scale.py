"""Make the tables of docs/gpu.md and docs/images/scale.png: time by part as a run grows.

    python docs/make_scale.py [--check]

All figures are computed by sg_rlhf.plan. ``--check`` writes nothing and fails if a table is out of
date.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from made_tables import main  # noqa: E402

from sg_rlhf.config import Config, load_config  # noqa: E402
from sg_rlhf.config.builtin_recipes import CONFIGS  # noqa: E402
from sg_rlhf.machine.hardware import named, of_gpus  # noqa: E402
from sg_rlhf.plan.load import fitted  # noqa: E402
from sg_rlhf.plan.memory import MemoryPlan  # noqa: E402
from sg_rlhf.plan.of_recipe import Plan, fastest  # noqa: E402
from sg_rlhf.plan.run_shape import RunShape, run_shape  # noqa: E402
from sg_rlhf.plan.time import PARTS  # noqa: E402
from sg_rlhf.tasks.registry import DOMAINS  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
PICTURE = ROOT / "docs" / "images" / "scale.png"
RECIPE = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
MODELS = {
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
    "32B": "Qwen/Qwen2.5-32B-Instruct",
    "70B": "meta-llama/Llama-3.1-70B-Instruct",
}
GPUS = (1, 2, 4, 8, 16, 32, 64)
HARDWARE = (
    "1x24gb", "1x40gb", "1x80gb", "2x24gb", "2x40gb", "2x80gb", "4x24gb", "4x40gb", "4x80gb",
    "8x24gb", "8x40gb", "8x80gb", "2x8x80gb",
)  # fmt: skip


@cache
def _load(part: str) -> Config:
    return load_config(part)


def recipes() -> list[str]:
    """The shipped recipes that train on GPUs, as a user names them."""
    found = []
    for domain in DOMAINS:
        for file in sorted((CONFIGS / domain).glob("*.yaml")):
            name = f"configs/{domain}/{file.name}"
            run = run_shape(_load(name))
            if run is not None and not run.cpu:
                found.append(name)
    return found


def plan_on(recipe: str, hardware: str) -> MemoryPlan:
    """A shipped recipe's memory on named hardware, with the settings that the plan chooses."""
    config, more = _load(recipe), _load(f"hardware:{hardware}")
    # Key by key the later part wins, as if both were loaded, which takes far longer.
    config = replace(
        config, values=config.values | more.values, origin=config.origin | more.origin,
        sources=(*config.sources, *more.sources),
    )  # fmt: skip
    run = run_shape(fitted(config))
    assert run is not None, recipe
    return MemoryPlan(run, named(hardware))


def cell(memory: MemoryPlan) -> str:
    """What a plan says in a word: GiB that stay free on a GPU, or what is missing."""
    free = memory.hardware.gpu_memory_gib - memory.peak_gib
    if memory.cache and memory.cache.sequences < 1:
        return "vLLM"
    if free < 0:
        return f"-{max(1, round(-free))}"
    if memory.host_gib > memory.hardware.host_memory_gib:
        return "host"
    return f"{free:.0f}" if memory.fits else "no"


def fit_table() -> list[str]:
    """Every shipped recipe on every hardware; recipes of the same figures share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for recipe in recipes():
        cells = " | ".join(cell(plan_on(recipe, hardware)) for hardware in HARDWARE)
        name = recipe.removeprefix("configs/").removesuffix(".yaml")
        rows.setdefault((name.split("/")[0], cells), []).append(name)
    lines = [
        "| recipe | " + " | ".join(HARDWARE) + " |",
        "|---|" + "--:|" * len(HARDWARE),
    ]
    for (_domain, cells), names in rows.items():
        lines.append(f"| {', '.join(names)} | {cells} |")
    return lines


@cache
def recipe(model: str) -> RunShape:
    """The Knights & Knaves recipe with another model."""
    run = run_shape(load_config(RECIPE, [f"actor.model_name_or_path={MODELS[model]}"]))
    assert run is not None
    return run


@cache
def chosen(model: str, gpus: int) -> Plan | None:
    """The fastest settings that fit on H100s of 80 GB, eight per node; None if none fit."""
    nodes, of_node = max(1, gpus // 8), min(8, gpus)
    run = replace(recipe(model), nodes=nodes, gpus_per_node=of_node, engines=gpus)
    return fastest(run, of_gpus("h100", nodes=nodes, gpus_per_node=of_node))


def scale_table() -> list[str]:
    """Seconds per rollout step and GPU hours per 100 steps, one row per model."""
    lines = [
        f"| model | {' | '.join(map(str, GPUS))} |",
        f"|---|{'--:|' * len(GPUS)}",
    ]
    for model in MODELS:
        cells = []
        for gpus in GPUS:
            choice = chosen(model, gpus)
            if choice is None:
                cells.append("-")
                continue
            seconds = choice.seconds
            cells.append(f"{seconds:.0f} s, {100 * gpus * seconds / 3600:.0f} h")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


#: Model and H100s of the table of limits.
LIMITS = (("3B", 1), ("3B", 8), ("7B", 8), ("32B", 16), ("70B", 32))


def limits_table() -> list[str]:
    """Seconds by part, and how many times the limit of the hardware that is."""
    shown = ("sampling", "scoring", "update")
    heads = [f"{part} | limit | times" for part in shown]
    lines = [f"| model, H100s | {' | '.join(heads)} |", f"|---|{'--:|' * 3 * len(shown)}"]
    for model, gpus in LIMITS:
        choice = chosen(model, gpus)
        assert choice is not None and choice.time is not None
        cells = []
        for part in shown:
            seconds, least = choice.time.parts[part], choice.time.limits[part]
            cells += [f"{seconds:.1f} s", f"{least:.1f} s", f"{seconds / least:.1f}"]
        lines.append(f"| {model}, {gpus} | {' | '.join(cells)} |")
    return lines


TABLES = {"recipes": fit_table, "scale": scale_table, "limits": limits_table}


def draw() -> None:
    """Stacked bars of seconds per rollout step by part: one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(13, 4.2), constrained_layout=True)
    colours = dict(zip(PARTS, pyplot.get_cmap("tab10").colors, strict=False))
    for axis, model in zip(axes, MODELS, strict=True):
        found = {gpus: choice for gpus in GPUS if (choice := chosen(model, gpus))}
        foot = [0.0] * len(found)
        for part in PARTS:
            heights = [choice.time.parts[part] for choice in found.values() if choice.time]
            labels = [str(gpus) for gpus in found]
            axis.bar(labels, heights, bottom=foot, color=colours[part], label=part)
            foot = [a + b for a, b in zip(foot, heights, strict=True)]
        axis.set_title(f"{model} parameters")
        axis.set_xlabel("H100s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("estimated seconds per rollout step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False)
    figure.suptitle("512 responses of up to 4,096 tokens: estimated time by part (not measured)")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main(PAGE, TABLES, draw))
