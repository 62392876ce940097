"""What a job asks for, taken out of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.launch import data_commands, job
from sg_rlhf.machine.hardware import of_gpus
from sg_rlhf.plan.of_recipe import plan_of

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
RECIPES = sorted(
    path for folder in ("kk", "math", "search") for path in (CONFIGS / folder).glob("grpo_*.yaml")
)


def kk(*overrides: str) -> tuple[int, int]:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    return job.machines(load_config(recipe, overrides))


def test_machines_hold_every_model_that_has_gpus_of_its_own() -> None:
    assert kk() == (1, 8)
    assert kk("actor.num_nodes=4", "ref.num_nodes=4", "vllm.num_engines=32") == (4, 8)
    apart = ["train.colocate_all=false", "actor.num_gpus_per_node=4", "ref.num_gpus_per_node=4"]
    assert kk(*apart, "train.colocate_actor_ref=true", "vllm.num_engines=4") == (1, 8)
    assert kk(*apart, "vllm.num_engines=2", "vllm.tensor_parallel_size=4") == (2, 8)
    without = "algo.kl.init_coef=0"
    assert kk(*apart, without, "vllm.num_engines=1") == (1, 5)
    assert kk(*apart, "actor.num_nodes=2", without, "vllm.num_engines=2") == (2, 5)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("grpo_sg_qwen2.5-3b-instruct", "grpo-sg-qwen2-5-3b-instruct"),
        ("7B run", "run-7b-run"),
        ("Ä", "run"),
        ("a" * 60, "a" * 47),
        ("x" * 46 + ".b", "x" * 46),
    ],
)
def test_names_are_labels_of_dns(text: str, name: str) -> None:
    assert job.name_of(text) == name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_data_of_a_shipped_recipe_is_made_or_left_to_the_user(recipe: Path) -> None:
    command = data_commands.command_for(load_config(recipe))
    assert bool(command) == (recipe.parent.name != "search")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_amounts_are_the_plans_and_a_margin(recipe: Path) -> None:
    config = load_config(recipe)
    nodes, ranks = job.machines(config)
    plan = plan_of(config, hardware=of_gpus("h100", nodes=nodes, gpus_per_node=ranks))
    assert plan is not None
    memory, disk, estimate = job.resources(config, 80, nodes, ranks)
    assert 1.2 * plan.memory.host_gib < memory < 1.3 * plan.memory.host_gib + 16
    assert plan.memory.disk_gb + 50 <= disk < 1.3 * plan.memory.disk_gb + 100
    assert ("s a rollout" in estimate) == (plan.time is not None)


def test_a_model_of_unknown_size_gets_what_a_large_one_needs() -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    config = load_config(recipe, ["actor.model_name_or_path=someone/model"])
    assert job.resources(config, 80, 1, 8) == (512, 1000, "")


@pytest.mark.parametrize(
    ("hardware", "size"),
    [("8x40gb", 40), ("2x8x80gb", 80), ("1xgpu", 24), ("8xh100", 80), ("cpu", 80)],
)
def test_gpus_are_those_of_the_hardware(hardware: str, size: int) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    config = load_config([recipe, CONFIGS / "hardware" / f"{hardware}.yaml"])
    assert job.gpu_memory(config) == size
