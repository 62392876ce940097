"""The sizes that a recipe has for its plan."""

from __future__ import annotations

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.machine import hardware
from sg_rlhf.plan.run_shape import lora_parameters, run_shape
from tests.unit.plan.runs import EIGHT, RECIPE, run_of


def test_sizes_of_the_papers_recipe() -> None:
    run = run_of()
    assert (run.cpu, run.ranks, run.engines) == (False, 8, 8)
    assert hardware.named(run.hardware) == EIGHT
    assert (run.samples, run.optimizer_steps, run.turns) == (512, 2, 1)
    assert (run.train_pass_tokens, run.rollout_pass_tokens) == (4 * 5120, 8 * 5120)
    assert run.reference and run.checkpointing and run.temperature == 0.7


def test_sizes_of_others() -> None:
    def of(recipe: str, *overrides: str) -> object:
        return run_shape(load_config(recipe, list(overrides)))

    search = of("configs/search/grpo_sg_qwen2.5-3b.yaml")
    assert search is not None and search.turns == 5 and search.prefix_caching  # type: ignore[attr-defined]
    tiny = of("configs/kk/grpo_sg_tiny_cpu.yaml")
    assert tiny is not None and tiny.cpu and tiny.local_model  # type: ignore[attr-defined]
    assert of(RECIPE, "actor.model_name_or_path=somebody/unknown") is None
    assert search.logits == "fused"  # type: ignore[attr-defined]
    assert of(RECIPE, "actor.fused_logprobs=false").logits == "full"  # type: ignore[attr-defined]
    twice = of(RECIPE, "sg.update=lopti", "train.max_epochs=2", "algo.kl.init_coef=0")
    assert twice.optimizer_steps == 8 and not twice.reference  # type: ignore[attr-defined]
    dynamic = of(RECIPE, "train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=10000")
    assert dynamic.train_pass_tokens == dynamic.rollout_pass_tokens == 10000  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"^command line: train\.micro_batch_size=0: expected an integer, 1"
    ):
        of(RECIPE, "train.micro_batch_size=0")


def test_adapters_are_counted_as_peft_makes_them() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sg_rlhf.plan import shapes

    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shapes.from_config("here", {"model_type": "qwen2", **sizes})
    assert lora_parameters(shape, 8) == trained
