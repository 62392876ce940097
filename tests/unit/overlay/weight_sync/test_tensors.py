"""What a weight sync sends: a checkpoint's names, adapters merged into their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from sg_rlhf.overlay.weight_sync.tensors import engine_tensors
from tests.unit.overlay.model.test_log_prob_head import actor_of, model_folder


def plain_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def test_a_plain_model_as_it_is(tmp_path: Path) -> None:
    model = actor_of(model_folder(tmp_path, "qwen2")).model
    found = engine_tensors(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(found[name].materialize() is not None for name in found)
    assert all(
        torch.equal(found[name].materialize(), data) for name, data in plain_state(model).items()
    )


def test_frozen_parameters_are_left_out_where_asked(tmp_path: Path) -> None:
    model = actor_of(model_folder(tmp_path, "qwen2")).model
    model.model.embed_tokens.weight.requires_grad_(False)
    assert "model.embed_tokens.weight" in engine_tensors(model)
    assert "model.embed_tokens.weight" not in engine_tensors(model, without_frozen=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"]])
def test_adapters_are_merged_as_peft_merges_them(
    tmp_path: Path, dtype: torch.dtype, targets: Any
) -> None:
    folder = model_folder(tmp_path, "qwen2", attention_bias=True)
    actor = actor_of(folder, lora_rank=4, lora_alpha=8, target_modules=targets)
    model = actor.model.to(dtype)
    adapters = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # B is zero at the start: nothing to merge
            torch.nn.init.normal_(parameter, std=0.3)
    sources = engine_tensors(model)
    merged = {name: source.materialize().clone() for name, source in sources.items()}
    before = {name: source.parameters[0].clone() for name, source in sources.items()}
    assert all(source.parameters[0].shape == merged[n].shape for n, source in sources.items())
    expected = plain_state(model.merge_and_unload())
    assert list(merged) == list(expected)
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    changed = [name for name in merged if not torch.equal(merged[name], before[name])]
    assert len(changed) == len(adapters) > 0
    assert all(source.parameters for source in sources.values())
