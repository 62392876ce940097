"""One rank of the test of what ZeRO-3 ranks put into the buckets of a weight sync.

    python weight_sync_on_ranks.py OUT [MODEL]

The tiny recipe's model has LoRA adapters; that in the folder MODEL has none. Rank 0 keeps what it
would send instead of sending it. It writes to OUT the names in order, whether every tensor is the
one that gathering it alone gives, with its adapters merged, and the calls it would have made.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Sets the worker up, so it comes before everything that needs that.
import update_on_ranks as update

# isort: split
import deepspeed
import torch
from transformers.core_model_loading import revert_weight_conversion

from sg_rlhf.config.derived import weight_sync
from sg_rlhf.overlay.weight_sync import buckets
from sg_rlhf.overlay.weight_sync.sender import WeightSync

RANK, ALPHA = 4, 8


class Kept(WeightSync):
    """Of this rank: the tensors of the buckets that it would have sent."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[bool, bool]] = []

    def _call_engines(
        self, _action: str, method: str, metadata: Any, first: bool, last: bool, broadcast: Any,
        **_: Any,
    ) -> None:  # fmt: skip
        assert method == "receive_bucket"
        bucket = buckets.from_metadata(metadata)
        assert buckets.is_intact(bucket, broadcast)
        self.tensors |= buckets.unpack(bucket, broadcast.clone())
        self.calls.append((first, last))


def main(out: Path, model_folder: str = "") -> None:
    recipe, _ = update.cases()["grpo_sg"]
    weight_sync.BUCKET_MIB["gloo"] = 1
    overrides = ["ds.zero_stage=3"]
    if model_folder:
        overrides.append(f"actor.model_name_or_path={model_folder}")
    args = update.arguments(recipe, overrides, 2)
    adapters: dict[str, Any] = {
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "target_modules": "all-linear",
    }
    trainer = update.trainer_of(*update.prepare(args, **({} if model_folder else adapters)), 2)
    model = trainer.actor.model.module
    if not model_folder:
        model = model.get_base_model()
    parameters = dict(model.named_parameters())
    shards = [p.ds_tensor.numel() < p.ds_numel for p in parameters.values()]
    torch.manual_seed(0)
    for name, parameter in parameters.items():
        if "lora_B" in name:  # zeros at the start: nothing would be merged
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                torch.nn.init.normal_(parameter.data)
    sync = Kept(trainer)
    sync.send()
    expected = {}
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue
        layer, _, _ = name.partition(".base_layer.weight")
        a, b = (parameters.get(f"{layer}.lora_{x}.default.weight") for x in "AB")
        with deepspeed.zero.GatheredParameters([p for p in (parameter, a, b) if p is not None]):
            value = parameter.data.clone()
            if a is not None and b is not None and name.endswith("weight"):
                delta = ALPHA / RANK * (b.data.float() @ a.data.float())
                value += delta.to(value.dtype)
            name = name.replace(".base_layer", "")
            # A whole one alone: stacked experts are split as in a checkpoint.
            expected |= revert_weight_conversion(model, {name: value})
    if torch.distributed.get_rank() == 0:
        found = {
            "names": list(sync.tensors), "expected": list(expected), "calls": sync.calls,
            "equal": [torch.equal(sync.tensors[name], value) for name, value in expected.items()],
            "sharded": all(shards), "adapted": sum("lora_B" in name for name in parameters),
        }  # fmt: skip
        torch.save(found, out)
    else:
        assert not sync.tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
