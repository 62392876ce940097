"""A folder that holds LoRA adapters alone is no model: one line says how to make one of it."""

import json
import shutil
from pathlib import Path

import pytest

from sg_rlhf.data_io import model_folder
from sg_rlhf.eval.run import main

TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "kk_tiny"


@pytest.fixture(params=["adapter_model.safetensors", "adapter_model.bin"])
def adapters(request, tmp_path: Path) -> Path:
    """What training with `ds.lora.rank` leaves: with ZeRO-3 the weights are a .bin."""
    folder = tmp_path / "checkpoints" / "final"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    (folder / "model.safetensors").rename(folder / request.param)
    config = {"base_model_name_or_path": "Qwen/Qwen2.5-3B", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_are_refused_with_the_command_that_merges_them(adapters: Path) -> None:
    expected = (
        "LoRA adapters without their model; merge the two first: python -m "
        f"openrlhf.cli.lora_combiner --model_path Qwen/Qwen2.5-3B --lora_path {adapters} "
        f"--output_path {adapters}-merged"
    )
    with pytest.raises(model_folder.ModelError, match=f"^{expected}$"):
        model_folder.check(adapters)


def test_a_whole_model_beside_adapters_is_a_model(adapters: Path) -> None:
    shutil.copy(TINY / "model.safetensors", adapters)
    model_folder.check(adapters)


def test_an_evaluation_refuses_them_before_anything_starts(adapters, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["--suite", "kk", "--model", str(adapters), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m openrlhf.cli.lora_combiner" in error
    assert not out.exists()
