"""The tables of docs/gpu.md are those that sg_rlhf.plan computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sg_rlhf.plan import of_recipe, overview
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.run_shape import run_shape

ROOT = Path(__file__).parents[3]


def test_the_tables_are_as_computed() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/make_scale.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_cell_is_the_commands_plan() -> None:
    recipe = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
    for name in overview.HARDWARE:
        config, machine = of_recipe.load_for([recipe], (), name)
        run = run_shape(config)
        assert run is not None and machine is not None
        assert overview.cell(MemoryPlan(run, machine)) == overview.cell(
            overview.plan_on(recipe, name)
        )
