"""The communicator of the weight sync without NCCL: rank 0 of the policy and the engines."""

from __future__ import annotations

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group


class GlooGroup:
    """A gloo group with the calls that the weight sync makes on its NCCL communicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self._group: torch.distributed.ProcessGroup = (
            stateless_init_torch_distributed_process_group(
                host, port, rank, world_size, backend="gloo"
            )
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Send ``tensor`` from rank ``src`` to all ranks, in place, and wait for the end."""
        self.start_broadcast(tensor, src, stream).wait()

    def start_broadcast(
        self, tensor: torch.Tensor, src: int, stream: object = None
    ) -> torch.distributed.Work:
        """Start :meth:`broadcast`, as NCCL's does."""
        del stream
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: object
) -> GlooGroup:
    """Upstream's function of this name, with gloo instead of NCCL; same arguments."""
    del device
    return GlooGroup(master_address, master_port, rank, world_size)
