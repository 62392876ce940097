"""Every shipped recipe on every hardware, as one table."""

from __future__ import annotations

import functools
from dataclasses import replace

from sg_rlhf.config import Config, load_config
from sg_rlhf.config.builtin_recipes import CONFIGS
from sg_rlhf.machine.hardware import named
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.run_shape import run_shape
from sg_rlhf.tasks.registry import DOMAINS

HARDWARE = (
    "1x24gb", "1x40gb", "1x80gb", "2x24gb", "2x40gb", "2x80gb", "4x24gb", "4x40gb", "4x80gb",
    "8x24gb", "8x40gb", "8x80gb", "2x8x80gb",
)  # fmt: skip


@functools.cache
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
    """A shipped recipe's memory on named hardware, with its settings."""
    config = _load(recipe)
    # Key by key the later part wins, as if both were loaded, which takes far longer.
    config = replace(config, values=config.values | _load(f"hardware:{hardware}").values)
    run = run_shape(config)
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


def table() -> list[str]:
    """Markdown; recipes of the same figures share a row."""
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
