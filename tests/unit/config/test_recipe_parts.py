"""The parts of a recipe, and the weighting that they amount to."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import ConfigError, load_config, weighting_of
from sg_rlhf.config.builtin_recipes import CONFIGS, add_arguments, algorithms, words
from sg_rlhf.config.recipe_listing import main, models
from sg_rlhf.overlay.driver.arguments import upstream_arguments

# -- A recipe's parts: files, algorithms and hardware by name, and older file names --------------


MODEL = "configs/kk/grpo_qwen2.5-3b.yaml"


@pytest.mark.parametrize("name", ["grpo_sg", "lopti", "dapo", "grpo_sg_u1.2"])
def test_an_algorithm_is_its_file_on_top(name: str) -> None:
    file = CONFIGS / "algorithms" / f"{name}.yaml"
    named = load_config([MODEL, f"algorithm:{name}"])
    assert named.flat() == load_config([MODEL, file]).flat()
    # The older file name, of every algorithm.
    assert load_config(f"configs/kk/{name}_qwen2.5-3b.yaml").flat() == named.flat()


@pytest.mark.parametrize("name", ["8x80gb", "1x24gb", "2x8xh200", "cpu"])
def test_hardware_is_named_in_four_ways(tmp_path: Path, name: str) -> None:
    named = load_config([MODEL, f"hardware:{name}"])
    assert named.hardware == name
    for line in (f"hardware:{name}", f"configs/hardware/{name}.yaml"):
        (tmp_path / "mine.yaml").write_text(f"extends: [{MODEL}, '{line}']\n")
        assert load_config(tmp_path / "mine.yaml").flat() == named.flat()
    for file in (f"configs/hardware/{name}.yaml", CONFIGS / "hardware" / f"{name}.yaml"):
        assert load_config([MODEL, file]).flat() == named.flat()


def test_parts_are_found_outside_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_config([MODEL, "hardware:4x40gb"]).flat()
    older = load_config("configs/kk/grpo_sg_qwen2.5-3b.yaml").flat()
    monkeypatch.chdir(tmp_path)
    assert load_config([MODEL, "configs/hardware/4x40gb.yaml"]).flat() == here
    assert load_config("configs/kk/grpo_sg_qwen2.5-3b.yaml").flat() == older


def test_a_hardware_file_of_the_users_own_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    own = tmp_path / "hardware" / "8x80gb.yaml"
    own.write_text("vllm: {num_engines: 3}\n")
    config = load_config([MODEL, "hardware:4x40gb", own])
    assert config.value("vllm.num_engines") == 3 and config.hardware == "4x40gb"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("algorithm:lopty", "algorithm:lopty: no such algorithm; did you mean lopti"),
        ("hardware:8x80", "hardware:8x80: no such hardware; expected cpu or "),
        ("configs/hardware/8x80.yaml", "8x80.yaml: no such recipe"),
        ("configs/kk/grpo_sg_nothing.yaml", "grpo_sg_nothing.yaml: no such recipe"),
        ("configs/kk/lopty_qwen2.5-3b.yaml", "lopty_qwen2.5-3b.yaml: no such recipe"),
        ("configs/kk/grpo_tiny_cp.yaml", "/configs/kk/grpo_tiny_cpu.yaml?"),
        ("kk/grpo_tinycpu.yaml", "no such recipe; did you mean configs/kk/grpo_tiny_cpu.yaml?"),
    ],
)
def test_a_part_that_is_none_is_one_line(part: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([MODEL, part])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_options_of_a_command_line_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, required=True)
    line = [
        "--config",
        "a.yaml",
        "--hardware",
        "4x40gb",
        "--algorithm",
        "lopti",
        "--config",
        "b.yaml",
    ]
    parts = parser.parse_args(line).config
    assert parts == ["a.yaml", "hardware:4x40gb", "algorithm:lopti", "b.yaml"]
    assert words(parts) == line
    for wrong in (["--hardware", "8x80"], ["--algorithm", "lopty"], ["--hardware", "cpu"]):
        with pytest.raises(SystemExit):  # the last has no --config
            parser.parse_args(wrong)
    err = capsys.readouterr().err
    assert "8x80: no such hardware" in err and "did you mean lopti?" in err


def test_the_description_of_an_algorithm_is_a_whole_sentence() -> None:
    """`sg-rlhf recipes` prints the first line of the file."""
    for path in (CONFIGS / "algorithms").glob("*.yaml"):
        assert path.read_text().split("\n", 1)[0].endswith("."), path.name


HARDWARE_NAMES = ("cpu", "1x24gb", "4x40gb", "8x80gb", "2x8xh100")


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(HARDWARE_NAMES, 2)])
def test_hardware_on_top_replaces_all_of_another(before: str, after: str) -> None:
    alone = load_config(f"hardware:{after}")
    both = load_config([f"hardware:{before}", f"hardware:{after}"])
    assert (both.values, both.sg) == (alone.values, alone.sg)


def test_layers_do_not_depend_on_one_another() -> None:
    """Model, algorithm and hardware set different keys, so their order does not matter."""
    of_hardware = load_config("hardware:8x80gb").values.keys()
    for name in algorithms():
        assert not load_config(f"algorithm:{name}").values.keys() & of_hardware, name
    for order in itertools.permutations(["algorithm:lopti", "hardware:2x40gb"]):
        config = load_config([MODEL, *order])
        assert config.sg.update == "lopti" and config.value("vllm.num_engines") == 2


def test_the_listing_has_every_model_algorithm_and_usual_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    files = {file for _, _, file in models()}
    assert len(files) >= 15 and all(Path(CONFIGS.parent, file).is_file() for file in files)
    for name in (*files, *algorithms(), "8x80gb", "4x24gb", "h200"):
        assert name in out


# -- `sg.weighting` and `sg.objective`: how layers settle, and what is refused -------------------


TINY_RECIPE = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


def weighting(*layers: str | Path) -> dict[str, Any]:
    recipes = [layer for layer in layers if isinstance(layer, Path)]
    overrides = [layer for layer in layers if isinstance(layer, str)]
    return load_config(recipes or None, overrides).sg.weighting


def test_a_type_is_a_statement_of_its_own_and_parameters_amend() -> None:
    assert weighting(TINY_RECIPE)["upper"] == 1.2
    assert weighting("sg.weighting.upper=1.3", "sg.weighting.type=reverse")["upper"] == 1.4
    assert weighting(TINY_RECIPE, "sg.weighting={upper: 1.1}")["upper"] == 1.1
    assert weighting(TINY_RECIPE, "sg.weighting.upper=1.1")["type"] == "grpo_sg"
    assert weighting(TINY_RECIPE, "sg.weighting=stapo") == weighting("sg.weighting={type: stapo}")
    assert weighting(TINY_RECIPE, "sg.weighting.tau=7", "sg.weighting.tau=5")["tau"] == 5.0
    assert weighting("sg.weighting=null")["type"] == "grpo_sg"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sg.weighting.taw=1", r"sg\.weighting\.taw=1: expected one of .*did you mean tau\?"),
        ("sg.weighting.type=grpo", r"sg\.weighting\.type='grpo': expected .*mean grpo_sg"),
        ("sg.weighting.tau=-1", r"sg\.weighting\.tau=-1\.0: expected a finite number above 0"),
        ("sg.weighting.tau=nine", r"sg\.weighting\.tau='nine': expected a finite number above 0"),
        ("sg.weighting.upper=0.5", r"sg\.weighting\.upper=0\.5: expected lower=1\.0 or more"),
        ("sg.weighting.placement=beside", r"placement='beside': expected one of inside, outside"),
        ("sg.weighting=[1]", r"sg\.weighting=\[1\]: expected a mapping"),
        ("sg.weighting.type=os:path", r"sg\.weighting\.type='os:path': expected a subclass"),
        ("sg.weighting.allow_constant=1", "allow_constant=1: expected true or false"),
        ("sg.objective.cap=2", r"sg\.objective\.cap=2: expected no parameters"),
        ("sg.objective=2", r"sg\.objective=2: expected a mapping"),
        ("sg.wieghting.tau=2", r"unknown key 'sg.wieghting.tau'; did you mean"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: .*{message}") as refusal:
        load_config(TINY_RECIPE, [override])
    assert "\n" not in str(refusal.value)


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {TINY_RECIPE}\nsg:\n  weighting: {{type: stapo, probb: 1}}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: sg\.weighting\.probb=1: .*mean prob\?"):
        load_config(recipe)


def test_an_objectives_parameters_belong_to_the_loss() -> None:
    sapo = load_config(TINY_RECIPE, ["actor.policy_loss_type=sapo", "sg.objective.tau_negative=2"])
    assert sapo.sg.objective == {"tau_positive": 1.0, "tau_negative": 2.0}
    assert load_config(TINY_RECIPE, ["actor.policy_loss_type=sapo"]).sg.objective == {}
    with pytest.raises(ConfigError, match="actor.policy_loss_type=ppo is upstream's own loss"):
        load_config(TINY_RECIPE, ["actor.policy_loss_type=ppo", "sg.objective.cap=2"])


def test_a_weighting_of_another_package_is_named_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_weighting.py").write_text(
        """
from dataclasses import dataclass
from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings import Weighting

@dataclass(frozen=True, kw_only=True)
class Half(Weighting):
    "w = floor + (1 - floor) * p"
    floor: float = number(0.5, "w at p = 0", least=0.0, most=1.0)

    def weights(self, p_BT, context):
        return self.floor + (1 - self.floor) * p_BT
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "half_weighting:Half"
    config = load_config(TINY_RECIPE, [f"sg.weighting={{type: '{name}', floor: 0.25}}"])
    assert upstream_arguments(config).sg.weighting["floor"] == 0.25
    assert weighting_of(config).bounds() == (0.25, 1.0)
    assert weighting_of(config).describe().startswith(f"{name}: w = floor")
    with pytest.raises(ConfigError, match=r"sg\.weighting\.floor=2\.0: expected a number from 0"):
        load_config(TINY_RECIPE, [f"sg.weighting={{type: '{name}', floor: 2}}"])
