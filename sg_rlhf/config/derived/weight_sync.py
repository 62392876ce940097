"""How the weights go to the rollout engines: in buckets, whose size the transport decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: MiB of a bucket, by ``vllm.sync_backend``. Over gloo 64 is faster than 512 for 0.5B parameters
#: (lab/bench/weight_sync.py).
BUCKET_MIB = {"gloo": 64, "nccl": 512}


def bucket_bytes(value: Callable[[str], Any]) -> int:
    """Bytes of weights that are sent at a time."""
    return BUCKET_MIB.get(value("vllm.sync_backend"), BUCKET_MIB["nccl"]) * 2**20
