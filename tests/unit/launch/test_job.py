"""What a job asks for, taken out of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.launch import data, job

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
    command = data.command_for(load_config(recipe))
    assert bool(command) == (recipe.parent.name != "search")


@pytest.mark.parametrize("folder", data.COMMANDS)
def test_data_is_made_as_the_training_scripts_make_it(folder: str) -> None:
    """Word by word, so that a recipe trains on the same prompts however it is started."""
    domain, *words = data.COMMANDS[folder].split()
    script = (ROOT / "examples" / "scripts" / f"train_grpo_sg_{domain}.sh").read_text()
    assert words[:2] == ["--out", folder]
    for word in words[2:]:
        assert word in script, word
