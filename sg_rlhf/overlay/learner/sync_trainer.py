"""Upstream's policy trainer with our weight sync."""

from __future__ import annotations

import functools
from typing import Any

import openrlhf.trainer.ray.ppo_actor as upstream
import ray
import torch

from sg_rlhf.config.derived.weight_sync import uses_buckets
from sg_rlhf.overlay.patches.free_port import free_port
from sg_rlhf.overlay.settings.lookup import value_of
from sg_rlhf.overlay.weight_sync import sender


class SyncTrainer(upstream.ActorPPOTrainer):
    """Sends the policy's weights to the engines; the update is the subclass's."""

    args: Any
    strategy: Any
    vllm_engines: Any
    _model_update_group: Any

    @functools.cached_property
    def weight_sync(self) -> sender.WeightSync:
        """Planned at the first sync, when the model is whole."""
        return sender.WeightSync(self)

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines: in buckets, or as upstream does it."""
        if uses_buckets(value_of(self.args)):
            self.weight_sync.send()
        else:
            super().broadcast_to_vllm()

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Connect rank 0 and the engines; at a port that the kernel gives to nobody else.

        Args:
            backend: ``vllm.sync_backend``.
        """
        vllm = self.strategy.args.vllm
        if vllm.sync_with_ray:  # needs no port
            super()._init_vllm_sync_group(backend)
            return
        ranks_per_engine = vllm.tensor_parallel_size
        world_size = vllm.num_engines * ranks_per_engine + 1
        address, port = ray.util.get_node_ip_address(), free_port()
        joined = [
            engine.init_process_group.remote(
                address, port, i * ranks_per_engine + 1, world_size, "openrlhf", backend,
                use_ray=False,
            )
            for i, engine in enumerate(self.vllm_engines)
        ]  # fmt: skip
        self._model_update_group = upstream.stateless_init_process_group(
            address, port, 0, world_size, torch.cuda.current_device()
        )
        ray.get(joined)
