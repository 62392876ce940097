"""The weight sync's communicator without NCCL: DeepSpeed's rank 0 and the engines over gloo."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group


class GlooGroup:
    """The two calls that upstream makes on its NCCL communicator, over gloo."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self._group: Any = stateless_init_torch_distributed_process_group(
            host, port, rank, world_size, backend="gloo"
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send ``tensor`` from group rank ``src`` to all, in place; returns when it is done."""
        self.start_broadcast(tensor, src, stream).wait()

    def start_broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> Any:
        """Begin to; as NCCL's returns. The tensor is in use until the result's ``wait`` returns."""
        del stream
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: Any
) -> GlooGroup:
    """Gloo counterpart of upstream's function of this name (same arguments)."""
    del device
    return GlooGroup(master_address, master_port, rank, world_size)
