"""What the training scripts choose fits by the plan, as do their limits of host memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sg_rlhf.plan.overview import DOMAINS, plan_on

SCRIPTS = Path(__file__).parents[3] / "examples" / "scripts"
HARDWARE = [f"{count}x{size}gb" for size in (24, 40, 80) for count in (1, 2, 4, 8)] + ["2x8x80gb"]


def models_on(hardware: str) -> str:
    """The largest models that common.sh takes a machine to hold."""
    done = subprocess.run(
        ["bash", "-c", f"source {SCRIPTS}/common.sh && echo $models"],
        env={"PATH": "/usr/bin:/bin", "SG_HARDWARE": hardware},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def recipe_of(domain: str, models: str) -> str:
    """The recipe that a domain's script trains with such models."""
    script = (SCRIPTS / f"train_grpo_sg_{domain}.sh").read_text()
    for sizes, recipe in re.findall(r"^  ([\w |]+)\) recipe=(\S+)", script, re.MULTILINE):
        if models in sizes.split(" | "):
            return str(recipe)
    raise AssertionError((domain, models))


def host_memory_asked_for(models: str, count: int) -> int:
    """GiB below which common.sh takes a smaller model."""
    source = (SCRIPTS / "common.sh").read_text()
    of_8b, of_3b = re.findall(r"need=\$\(\((\d+) \+ (\d+) \* count\)\)", source)
    base, each = {"8b": of_8b, "3b": of_3b}[models]
    return int(base) + int(each) * count


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("domain", DOMAINS)
def test_what_the_scripts_choose_fits(domain: str, hardware: str) -> None:
    models = models_on(hardware)
    memory = plan_on(recipe_of(domain, models), hardware)
    free = memory.hardware.gpu_memory_gib - memory.peak_gib
    assert free > 0.05 * memory.hardware.gpu_memory_gib, memory.verdict()
    assert memory.cache is not None and memory.cache.sequences >= 4
    if models != "1b":
        count = memory.hardware.gpus_per_node
        assert memory.host_gib <= host_memory_asked_for(models, count), memory.host_gib
