"""DeepSpeed's engine of a policy with random weights, as upstream makes it for a recipe."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu import random_qwen2

ADAM = {"lr": 1e-6, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def policy_engine(
    shape: dict[str, Any], stage: int, device: str, *, adam_offload: bool = False,
    accumulation: int = 1, checkpointing: bool = True, leaf: bool = True, fp32_sums: bool = False,
) -> Any:  # fmt: skip
    """A Qwen2 of a shape of sg_rlhf/plan in bfloat16, with varlen attention, under a ZeRO stage.

    Args:
        accumulation: micro-batches of an optimizer step.
        checkpointing: layers are recomputed in the backward pass.
        leaf: under ZeRO-3, layers are leaf modules, as in a run.
        fp32_sums: gradients are summed in float32 (``ds.grad_accum_dtype``).
    """
    import deepspeed
    from openrlhf.utils.deepspeed.deepspeed_utils import (
        get_optimizer_grouped_parameters,
        get_train_ds_config,
    )
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sg_rlhf.overlay.model import leaf_layers
    from sg_rlhf.overlay.model.packed_attention import VARLEN, attention

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, attention)
    settings = get_train_ds_config(
        offload=False,
        adam_offload=adam_offload,
        stage=stage,
        zpg=1,
        grad_accum_dtype="fp32" if fp32_sums else None,
        optim_config={"type": "AdamW", "params": {**ADAM, "torch_adam": True, "fused": True}},
    )
    settings["train_micro_batch_size_per_gpu"] = 1
    settings["gradient_accumulation_steps"] = accumulation
    # While it lives, zero.Init is used.
    keep = HfDeepSpeedConfig(settings) if stage == 3 else None
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            random_qwen2.config_of(shape), dtype=torch.bfloat16, attn_implementation=VARLEN
        )
    del keep
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if stage == 3 and leaf:
        leaf_layers.mark(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=get_optimizer_grouped_parameters(model, ADAM["weight_decay"]),
        config=settings,
    )
    return engine
