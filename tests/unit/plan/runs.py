"""Runs of the paper's recipe on any model and number of GPUs, for the tests of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sg_rlhf.config import load_config
from sg_rlhf.machine.hardware import Hardware, named
from sg_rlhf.plan.run_shape import RunShape, run_shape

RECIPE = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
EIGHT = named("8xh100")


def run_of(model: str = "Qwen/Qwen2.5-3B-Instruct", **changes: Any) -> RunShape:
    """The Knights & Knaves recipe of a model of the table, with some sizes changed."""
    run = run_shape(load_config(RECIPE, [f"actor.model_name_or_path={model}"]))
    assert run is not None
    return replace(run, **changes)


def on_gpus(run: RunShape, gpus: int) -> tuple[RunShape, Hardware]:
    """The run and its hardware with so many H100s, eight to a node."""
    nodes, of_node = max(1, gpus // 8), min(8, gpus)
    changed = replace(
        run, nodes=nodes, gpus_per_node=of_node, engines=max(1, gpus // run.engine_tp)
    )
    return changed, named(f"{nodes}x{of_node}xh100")
