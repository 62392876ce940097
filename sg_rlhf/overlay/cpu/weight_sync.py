"""The engine's side of the weight sync without NCCL.

Upstream broadcasts one parameter at a time over a NCCL communicator and loads each at once. On the
CPU the communicator is a gloo group (``gloo_group``), and the engine loads all parameters together:
vLLM's CPU linear layers repack their weights after loading, so a single tensor cannot be written
into them later, but ``reload_weights`` rebuilds the layers from checkpoint-format tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from sg_rlhf.overlay.cpu.gloo_group import GlooGroup


class CpuWorkerWrap(WorkerWrap):
    """Receives weights in a vLLM CPU worker and loads them when the last one has come."""

    model_config: Any
    model_runner: Any

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the gloo group; only ``sync_backend=gloo`` without Ray exists on the CPU."""
        assert backend == "gloo" and not use_ray, (backend, use_ray)
        rank = torch.distributed.get_rank() + rank_offset
        self._group = GlooGroup(master_address, master_port, rank, world_size)
        self._received: list[tuple[str, torch.Tensor]] = []

    def update_weight(
        self, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False
    ) -> None:
        """Receive one parameter; ``empty_cache`` marks the last one of a sync."""
        weight = torch.empty(tuple(shape), dtype=dtype)
        self._group.broadcast(weight, src=0)
        # A processor without bf16 units has an engine in float32, which holds every bf16 exactly.
        self._received.append((name, weight.to(self.model_config.dtype)))
        if empty_cache:
            received, self._received = self._received, []
            self.model_runner.reload_weights(weights_iterator=iter(received))
            repack_tied_heads(self.model_runner.get_model())


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let the output heads that share the embedding's matrix multiply by its present values.

    vLLM's CPU head multiplies by a packed copy of its weight. ``reload_weights`` makes a layer's
    copy anew when the layer's own tensors come; a tied head has none, and would stay as it was
    when the engine started.
    """
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)
