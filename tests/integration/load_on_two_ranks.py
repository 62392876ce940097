"""One rank of the ZeRO-3 loading test: loads the shipped model five times and compares it."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.overlay.patches import table

table.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed_utils import get_eval_ds_config  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from sg_rlhf.overlay.model.log_prob_head import PolicyModel  # noqa: E402

MODEL = Path(__file__).parents[2] / "sg_rlhf" / "tiny" / "kk_tiny"


def damaged_parameters(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose gathered value is not the checkpoint's."""
    names = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if name in expected and not torch.equal(parameter.data, expected[name]):
                names.append(name)
    return names


def main() -> None:
    deepspeed.init_distributed()
    expected = load_file(MODEL / "model.safetensors")
    config = get_eval_ds_config(offload=False, stage=3)
    config |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2}
    damaged: list[str] = []
    loads = 5
    dtypes = set()
    for _ in range(loads):
        actor = PolicyModel(str(MODEL), attn_implementation="sdpa", ds_config=config)
        damaged += damaged_parameters(actor.model, expected)
        dtypes.add(actor.model.model.rotary_emb.inv_freq.dtype)
    (dtype,) = dtypes
    print(f"{loads} loads, {len(damaged)} damaged parameters, rotary {str(dtype).split('.')[1]}")


if __name__ == "__main__":
    main()
