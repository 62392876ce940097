"""The engine's side of the weight sync on the CPU, over gloo instead of NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from sg_rlhf.overlay.cpu.gloo import GlooGroup
from sg_rlhf.overlay.weight_sync.receiver import BucketWorkerWrap
from sg_rlhf.sampling.seeded_sampler import SeededSamplingExtension


class CpuWorkerWrap(BucketWorkerWrap, SeededSamplingExtension):
    """Receives weights in a vLLM CPU worker: in buckets, or one by one as upstream sends them."""

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
        """Join the gloo group. On the CPU there is only ``sync_backend=gloo``, without Ray."""
        assert backend == "gloo" and not use_ray, (backend, use_ray)
        rank = torch.distributed.get_rank() + rank_offset
        self._model_update_group = GlooGroup(master_address, master_port, rank, world_size)
        self._received: list[tuple[str, torch.Tensor]] = []

    def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive one parameter. All are loaded with the last one of a sync (``empty_cache``)."""
        weight = torch.empty(tuple(shape), dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self._received.append((name, weight))
        if empty_cache:
            received, self._received = self._received, []
            self._load_tensors(received, first=True, last=True)

    def _load_tensors(
        self, tensors: list[tuple[str, torch.Tensor]], first: bool, last: bool
    ) -> None:
        model = self.model_runner.get_model()
        if first:
            pack_experts_again(model)
        super()._load_tensors(tensors, first, last)
        if last:
            repack_tied_heads(model)


def pack_experts_again(model: torch.nn.Module) -> None:
    """Have a reload pack the experts of an MoE: vLLM packs only where a layer has no kernel yet."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack output heads that are tied to the embedding.

    vLLM's CPU head multiplies by a packed copy of its weight, made when the layer's own tensors
    arrive. A tied head has none, and would keep the weights that the engine started with.
    """
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)
