"""The tables of docs/gpu.md are those that sg_rlhf.plan computes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from sg_rlhf.plan import of_recipe

ROOT = Path(__file__).parents[3]


def test_the_tables_are_as_computed() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/make_scale.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_cell_is_the_commands_plan() -> None:
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make_scale.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))
    spec.loader.exec_module(make)
    recipe = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
    for name in make.HARDWARE:
        config, machine = of_recipe.load_for([recipe], (), name)
        plan = of_recipe.plan_of(config, hardware=machine)
        assert plan is not None
        assert make.cell(plan.memory) == make.cell(make.plan_on(recipe, name))
