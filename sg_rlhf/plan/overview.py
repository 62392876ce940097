"""Every shipped recipe on every hardware, as one table."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.config.shipped_recipes import CONFIGS
from sg_rlhf.plan.of_recipe import Plan, load_for, plan_of

HARDWARE = (
    "1x24gb", "1x40gb", "1x80gb", "2x24gb", "2x40gb", "2x80gb", "4x24gb", "4x40gb", "4x80gb",
    "8x24gb", "8x40gb", "8x80gb", "2x8x80gb",
)  # fmt: skip
DOMAINS = ("kk", "math", "search")


def recipes() -> list[str]:
    """The shipped recipes that train on GPUs, as a user names them."""
    found = []
    for domain in DOMAINS:
        for file in sorted((CONFIGS / domain).glob("*.yaml")):
            name = f"configs/{domain}/{file.name}"
            config, _ = load_for([str(file)], (), None)
            plan = plan_of(config)
            if plan is not None and not plan.run.cpu:
                found.append(name)
    return found


def plan_on(recipe: str, hardware: str) -> Plan:
    """A shipped recipe's plan on named hardware."""
    file = CONFIGS / Path(recipe).relative_to("configs")
    config, machine = load_for([str(file)], (), hardware)
    plan = plan_of(config, hardware=machine, why=hardware)
    assert plan is not None, recipe
    return plan


def cell(plan: Plan) -> str:
    """What a plan says in a word: GiB that stay free on a GPU, or what is missing."""
    memory = plan.memory
    free = memory.hardware.gpu_memory_gib - memory.peak_gib
    if memory.cache and memory.cache.sequences < 1:
        return "vLLM"
    if free < 0:
        return f"{free:.0f}"
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
