"""A recipe's parts: files, algorithms and hardware by name, and older file names."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.builtin_recipes import CONFIGS, add_arguments, algorithms, words
from sg_rlhf.config.recipe_listing import main, models

MODEL = "configs/kk/grpo_qwen2.5-3b.yaml"


@pytest.mark.parametrize("name", ["grpo_sg", "lopti", "dapo", "grpo_sg_u1.2"])
def test_an_algorithm_is_its_file_on_top(name: str) -> None:
    file = CONFIGS / "algorithms" / f"{name}.yaml"
    named = load_config([MODEL, f"algorithm:{name}"])
    assert named.flat() == load_config([MODEL, file]).flat()
    # The older file name, of every algorithm.
    assert load_config(f"configs/kk/{name}_qwen2.5-3b.yaml").flat() == named.flat()


@pytest.mark.parametrize("name", ["8x80gb", "1xgpu", "2x8xh200", "cpu"])
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
