"""Shapes of models: their parameters as transformers builds them and as their makers count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sg_rlhf.plan import shapes

#: Published counts, from the models' safetensors on the hub.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct-1M": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
}


@pytest.mark.parametrize(("model", "count"), PUBLISHED.items())
def test_parameters_are_the_published_count(model: str, count: int) -> None:
    shape = shapes.shape_of(model)
    assert shape is not None and shape.parameters == count


@pytest.mark.parametrize("model", shapes.table())
def test_parameters_and_tensors_are_those_transformers_builds(model: str) -> None:
    config = AutoConfig.for_model(**shapes.table()[model])
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    shape = shapes.shape_of(model)
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in built.parameters())
    assert shape.tensors == len(list(built.parameters()))


def test_a_folder_is_read_and_what_is_unknown_is_none(tmp_path: Path) -> None:
    config = shapes.table()["Qwen/Qwen2.5-3B-Instruct"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shapes.shape_of(str(tmp_path)) == shapes.from_config(str(tmp_path), config)
    assert shapes.shape_of("somebody/unknown") is None
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    with pytest.raises(ValueError, match="mixture of experts"):
        shapes.shape_of(str(tmp_path))
    for wrong in ([], config | {"num_attention_heads": 0}, config | {"vocab_size": "many"}):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"its config\.json (is no|has) "):
            shapes.shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        shapes.shape_of(str(tmp_path))
