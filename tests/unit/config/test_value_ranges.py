"""Numbers that no run can use are refused where the recipe is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.config.value_ranges import RANGES, _matches, violation


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperature=0", "rollout.temperature=0.0: expected 0.01 or more"),
        ("rollout.temperature=0.005", "rollout.temperature=0.005: expected 0.01 or more"),
        ("eval.temperature=0.005", "eval.temperature=0.005: expected 0.01 or more, or 0"),
        ("rollout.temperature=.inf", "rollout.temperature=inf: expected a finite number"),
        ("rollout.temperature=.nan", "rollout.temperature=nan: expected a number"),
        ("rollout.top_p=2", "rollout.top_p=2.0: expected above 0 to 1"),
        ("actor.adam.lr=-1", "actor.adam.lr=-1.0: expected 0 or more"),
        ("actor.adam.betas=[0.9, 1]", "actor.adam.betas=[0.9, 1.0]: expected 0 to 1 without it"),
        ("train.num_episodes=0", "train.num_episodes=0: expected 1 or more"),
        ("ckpt.save_steps=0", "ckpt.save_steps=0: expected 1 or more, or -1"),
        ("data.max_samples=-4", "data.max_samples=-4: expected 1 or more"),
        ("train.seed=-1", "train.seed=-1: expected 0 to 2147483647"),
        ("logger.wandb.project=\udcff", "not a YAML value"),
        ("actor.adam.lr=" + "9" * 400, "actor.adam.lr=" + "9" * 20),
    ],
)
def test_a_number_out_of_range_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_has_no_limit_may_be_infinite_and_every_default_is_in_range() -> None:
    assert load_config(None, ["ckpt.max_mem=.inf"]).value("ckpt.max_mem") == float("inf")
    assert load_config(None, ["ckpt.save_steps=-1"]).value("ckpt.save_steps") == -1
    for key, flag in flags().items():
        default = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        assert default is None or violation(key, default) is None, key
    unused = [name for name in RANGES if not any(_matches(key, (name,)) for key in flags())]
    assert not unused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: " + b"[" * 3000 + b"]" * 3000, "not a valid YAML recipe"),
        (b'"0"', "not a valid YAML recipe"),
        (b'sg: {weighting: {"a\\nb": 1}}', "sg.weighting.a b"),
        (b"extends: 5", "extends=5: expected a recipe or a list of them"),
        (b"extends: {a: 1}", "extends={'a': 1}: expected a recipe"),
        (b"\xff\xfe\x00", "not a valid YAML recipe"),
        (b"a: !!python/object/apply:os.system ['true']", "not a valid YAML recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_that_is_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(ConfigError, match=r"loop\.yaml: no such recipe"):
        load_config(tmp_path / "loop.yaml")
