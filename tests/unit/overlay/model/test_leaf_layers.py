"""Decoder layers as ZeRO-3's leaf modules: the same numbers with fewer hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from sg_rlhf.overlay.model import leaf_layers

ROOT = Path(__file__).parents[4]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("adapters", [False, True])
def test_each_layer_of_a_model_is_marked(config: Any, adapters: bool) -> None:
    model: Any = AutoModelForCausalLM.from_config(config(**SIZES))
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert leaf_layers.mark(model) == 3
    marked = [name for name, part in model.named_modules() if getattr(part, "_z3_leaf", False)]
    assert [name.rpartition("model.layers.")[2] for name in marked] == ["0", "1", "2"]


def test_only_zero_3_marks_them() -> None:
    for stage, expected in ((2, 0), (3, 3)):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
        leaf_layers.mark_models(stage, [(SimpleNamespace(model=model), {}), None])
        found = [part for part in model.modules() if getattr(part, "_z3_leaf", False)]
        assert len(found) == expected


@pytest.mark.full
def test_three_steps_are_the_same_and_gather_a_fourth_as_often() -> None:
    """Loss and gradient norm of each step, bit for bit, with recomputed layers."""
    done = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    plain, leaf = json.loads(done.stdout.splitlines()[-1])
    assert plain["steps"] == leaf["steps"] and len(leaf["steps"]) == 3
    assert len({loss for loss, _ in leaf["steps"]}) == 3
    assert leaf["gathers"] < plain["gathers"] / 4


def three_steps() -> None:
    """The process of the test above: print losses, gradient norms and numbers of gathers."""
    from tests.gpu import zero3

    zero3.start("cpu")
    import torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from tests.gpu.policy_engine import policy_engine

    torch.set_num_threads(1)
    gathers, original = 0, PartitionedParameterCoordinator.fetch_sub_module

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return original(*args, **kwargs)

    PartitionedParameterCoordinator.fetch_sub_module = counted
    found = []
    for leaf in (False, True):
        torch.manual_seed(0)
        shape = {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES}
        engine = policy_engine(shape, 3, "cpu", accumulation=2, leaf=leaf)
        gathers, steps = 0, []
        for _ in range(3):
            for _ in range(2):
                ids = torch.randint(0, SIZES["vocab_size"], (1, 40))
                positions = torch.arange(20).repeat(2)[None]
                logits = engine(input_ids=ids, position_ids=positions).logits[0].float()
                loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
                engine.backward(loss)
                engine.step()
            steps.append((float(loss.detach()), float(engine.get_global_grad_norm())))
        found.append({"steps": steps, "gathers": gathers})
    print(json.dumps(found))


if __name__ == "__main__":
    three_steps()
