"""The weight sync's part of a policy rank: connect to the engines, and send the weights."""

from __future__ import annotations

import functools

import ray
import torch
from openrlhf.utils.distributed_util import (
    stateless_init_process_group,
    torch_dist_barrier_and_cuda_sync,
)
from ray.actor import ActorHandle

from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.cluster.free_port import free_port
from sg_rlhf.overlay.cpu import gloo, platform
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.weight_sync import sender


class SyncTrainer:
    """Sends the policy's weights to the engines, if there are any; the update is the subclass's."""

    def __init__(
        self, strategy: Strategy, actor: PolicyModel, vllm_engines: list[ActorHandle] | None = None
    ) -> None:
        self.strategy, self.args, self.actor = strategy, strategy.args, actor
        self.vllm_engines = vllm_engines
        train = self.args.train
        self.use_cuda_ipc = (
            self.args.vllm.sync_backend == "nccl" and train.colocate_all and not train.async_enable
        )
        if vllm_engines is not None and not self.use_cuda_ipc and torch.distributed.get_rank() == 0:
            self.connect_engines()
        torch_dist_barrier_and_cuda_sync()

    @functools.cached_property
    def weight_sync(self) -> sender.WeightSync:
        """Planned at the first sync, when the model is whole."""
        return sender.WeightSync(self)

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines."""
        self.weight_sync.send()

    def connect_engines(self) -> None:
        """Connect rank 0 and the workers of all engines; rank 0 calls it."""
        vllm, engines = self.args.vllm, self.vllm_engines or []
        ranks_per_engine = vllm.tensor_parallel_size
        world_size = len(engines) * ranks_per_engine + 1
        address, port = ray.util.get_node_ip_address(), free_port()
        joined = [
            engine.init_process_group.remote(
                address, port, i * ranks_per_engine + 1, world_size, "openrlhf",
                vllm.sync_backend, use_ray=False,
            )
            for i, engine in enumerate(engines)
        ]  # fmt: skip
        init = stateless_init_process_group
        if platform.is_cpu():
            init = gloo.stateless_init_process_group
        device = torch.cuda.current_device()
        self._model_update_group = init(address, port, 0, world_size, device)
        ray.get(joined)
