"""Files that are read: model folders, and JSON without surprises."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from sg_rlhf.data_io import merge_adapters, model_folder, strict_json
from sg_rlhf.eval.run import main

# -- A folder that holds LoRA adapters alone is no model: one line says how to make one of it ----


TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "kk_tiny"


@pytest.fixture(params=["adapter_model.safetensors", "adapter_model.bin"])
def adapters(request, tmp_path: Path) -> Path:
    """What training with `ds.lora.rank` leaves: with ZeRO-3 the weights are a .bin."""
    folder = tmp_path / "checkpoints" / "final"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    (folder / "model.safetensors").rename(folder / request.param)
    config = {"base_model_name_or_path": "/no/base", "peft_type": "LORA", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_are_refused_with_the_command_that_merges_them(adapters: Path) -> None:
    expected = f"LoRA adapters without their model; merge the two first: sg-rlhf merge {adapters}"
    with pytest.raises(model_folder.ModelError, match=f"^{expected}$"):
        model_folder.check(adapters)


def test_a_whole_model_beside_adapters_is_a_model(adapters: Path) -> None:
    shutil.copy(TINY / "model.safetensors", adapters)
    model_folder.check(adapters)


def test_an_evaluation_of_adapters_without_their_base_ends_before_anything_starts(
    adapters, tmp_path, capsys
) -> None:
    out = tmp_path / "out"
    assert main(["--suite", "arithmetic", "--model", str(adapters), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--base /no/base: no such folder" in error
    assert not out.exists()


# -- A token without a row in the embedding ------------------------------------------------------


@pytest.mark.parametrize("kind", ["token", "padding"])
def test_a_token_without_a_row_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = len(tokenizer)
    if kind == "token":
        tokenizer.add_tokens(["<mine>", "<yours>"])
        text, needed = "<mine>", rows + 2
    else:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        text, needed = "[PAD]", rows + 1
    tokenizer.save_pretrained(folder)
    with pytest.raises(model_folder.ModelError) as refused:
        model_folder.check(folder)
    assert str(refused.value).startswith(
        f"the tokenizer's token {text!r} has the id {rows}, but the embedding has {rows} rows "
        f"(vocab_size in config.json): call resize_token_embeddings({needed}) "
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(needed, mean_resizing=False)
    model.save_pretrained(folder)
    model_folder.check(folder)


def test_a_special_token_that_no_text_has_needs_no_row(tmp_path: Path) -> None:
    """Gemma 3's token for images."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<image>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model_folder.check(folder)


# -- Merging: in float32, rounded once, and what the rounding undid is said ----------------------


def trained_adapters(run_dir: Path, moved: float, base: Path = TINY) -> Path:
    """Adapters of a bf16 run, whose B matrices training moved by about ``moved``."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=moved, generator=generator)
    folder = run_dir / "checkpoints" / "final"
    adapted.save_pretrained(folder)
    model.config.to_json_file(folder / "config.json")
    (run_dir / "config.yaml").write_text("ds: {param_dtype: bf16}\n")
    return folder


def layer_of(folder: Path) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor("model.layers.1.mlp.up_proj.weight")


def test_merged_in_float32_and_rounded_once(tmp_path: Path, capsys) -> None:
    folder = trained_adapters(tmp_path, 1e-2)
    assert merge_adapters.main([str(folder)]) == 0
    found = layer_of(tmp_path / "checkpoints" / "final-merged")
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        name = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"
        a, b = (file.get_tensor(name.format(x)).float() for x in "AB")
    base = layer_of(TINY).to(torch.bfloat16).float()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (base + 2 * (b @ a)).to(torch.bfloat16))
    # Rounding the product before the sum, as a merge in bf16 does, gives other weights.
    assert not torch.equal(found, base.to(torch.bfloat16) + (2 * b @ a).to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", False), ("float32", True)])
def test_what_the_rounding_undoes_is_printed(tmp_path: Path, capsys, dtype, kept) -> None:
    folder, out = trained_adapters(tmp_path, 1e-5), tmp_path / "merged"
    assert merge_adapters.main([str(folder), "--dtype", dtype, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    record = json.loads((out / "merge.json").read_text())
    change = layer_of(out).float() - layer_of(TINY).to(torch.bfloat16).float()
    assert record["training"] == pytest.approx(2e-5, rel=0.9) and record["dtype"] == dtype
    assert (record["undone"] < 0.01, "notice: the rounding hides" in said) == (kept, not kept)
    assert (record["rounding"] == 0) == kept == bool((change != 0).double().mean() > 0.5)


def test_what_cannot_be_merged_is_one_line_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    folder, out = trained_adapters(tmp_path, 1e-2), tmp_path / "out"
    capsys.readouterr()  # the bar of loading that model

    def refused(message: str, *words: object) -> None:
        assert merge_adapters.main([*map(str, words), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not [*tmp_path.glob("*out*")]

    other = tmp_path / "base"
    shutil.copytree(TINY, other)
    config = json.loads((TINY / "config.json").read_text())
    fewer = {"num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
    (other / "config.json").write_text(json.dumps(config | fewer))
    refused("adapters for unknown base_model.model.model.layers.3", folder, "--base", other)
    refused("no adapter_config.json there", TINY)
    refused("--base module:no.such: no such module", folder, "--base", "module:no.such")
    refused("no such folder", tmp_path / "nowhere")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused("adapter_model.safetensors is truncated", folder)


def test_an_earlier_merge_is_used_again_until_the_adapters_change(tmp_path: Path, capsys) -> None:
    folder = trained_adapters(tmp_path / "run", 1e-2)
    merged = merge_adapters.merged_copy(folder, None)
    before = (merged / "model.safetensors").stat().st_mtime_ns
    assert merge_adapters.merged_copy(folder, None) == merged
    assert (merged / "model.safetensors").stat().st_mtime_ns == before
    assert merge_adapters.merged_copy(folder, "float32").name == "final-merged-float32"
    trained_adapters(tmp_path / "run", 2e-2)
    with pytest.raises(model_folder.ModelError, match="final-merged is no merged model of these"):
        merge_adapters.merged_copy(folder, None)


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
