"""Files that are read: model folders, and JSON without surprises."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from sg_rlhf.data_io import model_folder, strict_json
from sg_rlhf.eval.run import main

# -- A folder that holds LoRA adapters alone is no model: one line says how to make one of it ----


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


# -- JSON that every reader takes: null for what is not finite, and strings as they are ----------


def test_what_is_not_finite_is_null_and_strings_stay() -> None:
    value = {
        "NaN": ["NaNometre, Infinity", math.nan, -math.inf, (1, 2.5)],
        3: {"array": np.array([1.0, math.nan]), "number": np.float64("inf"), "flag": True},
        "none": None,
    }

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(strict_json.dumps(value), parse_constant=refuse) == {
        "NaN": ["NaNometre, Infinity", None, None, [1, 2.5]],
        "3": {"array": [1.0, None], "number": None, "flag": True},
        "none": None,
    }
    assert strict_json.dumps({"a": math.nan}, indent=1) == '{\n "a": null\n}'
