"""One rank of the test of what ZeRO-3 ranks put into the buckets of a weight sync.

    python weight_sync_on_ranks.py OUT

Rank 0 keeps what it would send instead of sending it, and writes to OUT the names in order, whether
every tensor is the one that gathering it alone gives, and the calls it would have made.
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

from sg_rlhf.overlay import weight_buckets
from sg_rlhf.overlay.weight_sync import WeightSync


class Kept(WeightSync):
    """Of this rank: the tensors of the buckets that it would have sent."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[bool, bool]] = []

    def _await(
        self, _what: str, method: str, wire: Any, first: bool, last: bool, sent: Any, **_: Any
    ) -> None:
        assert method == "receive_bucket"
        bucket = weight_buckets.from_wire(wire)
        assert weight_buckets.damaged(bucket, sent) is None
        self.tensors |= weight_buckets.unpack(bucket, sent.clone())
        self.calls.append((first, last))


def main(out: Path) -> None:
    recipe, _ = update.cases()["grpo_sg"]
    args = update.arguments(recipe, ["ds.zero_stage=3", "sg.sync_bucket_mb=1"], 2)
    trainer = update.trainer_of(*update.prepare(args), 2)
    parameters = dict(trainer.actor.model.module.named_parameters())
    shards = [p.ds_tensor.numel() < p.ds_numel for p in parameters.values()]
    sync = Kept(trainer)
    sync.send()
    equal = []
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters([parameter]):
            if sync.tensors:
                equal.append(torch.equal(sync.tensors[name], parameter.data))
    if torch.distributed.get_rank() == 0:
        found = {
            "names": list(sync.tensors), "expected": list(parameters), "equal": equal,
            "calls": sync.calls, "sharded": all(shards),
        }  # fmt: skip
        torch.save(found, out)
    else:
        assert not sync.tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
