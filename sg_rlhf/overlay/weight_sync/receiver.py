"""The engine's side of the weight sync in buckets: an extension of vLLM's worker.

After loading, vLLM changes the layout of weights: CPU linear layers and quantised layers are
packed, experts are reordered. Tensors of a checkpoint cannot be copied into such weights. vLLM's
layerwise reload rebuilds a layer once all of its tensors have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from sg_rlhf.overlay.weight_sync import buckets

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class BucketWorkerWrap(WorkerWrap):  # type: ignore[misc]  # upstream has no types
    """Upstream's worker extension that also receives buckets of tensors.

    vLLM adds it to the bases of its worker class and refuses names that the worker already has.
    """

    device: torch.device
    model_config: ModelConfig
    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    _opened_buffer: torch.Tensor | None = None

    def engine_facts(self) -> dict[str, Any]:
        """What this engine runs with: for ``environment.json``."""
        groups = [group for kind in self.model_runner.attn_groups for group in kind]
        compilation = self.vllm_config.compilation_config
        scheduler = self.vllm_config.scheduler_config
        kernels = {
            getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
            for layer in compilation.static_forward_context.values()
        }
        return {
            "vllm": vllm.__version__,
            "platform": type(current_platform).__name__,
            "device": current_platform.get_device_name(),
            "attention": sorted({group.backend.get_name() for group in groups}),
            "flash_attention": sorted(kernels - {None}),
            "enforce_eager": self.model_config.enforce_eager,
            "cuda_graphs": str(compilation.cudagraph_mode),
            "cuda_graph_sizes": compilation.cudagraph_capture_sizes or [],
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "prefix_caching": self.vllm_config.cache_config.enable_prefix_caching,
            "binaries": _loaded_binaries(),
        }

    def receive_bucket(
        self,
        metadata: Sequence[Any],
        first: bool,
        last: bool,
        handles: dict[str, Any] | None = None,
    ) -> str | None:
        """Receive one bucket of a sync, verify its checksum and load its tensors.

        ``handles``: with the first bucket on a shared GPU, physical GPU -> CUDA IPC handle of the
        buffer; None for a broadcast. Returns None, or an error in one line and loads nothing.
        """
        bucket = buckets.from_metadata(metadata)
        if first:
            self._opened_buffer = None
            if handles is not None:
                gpu = get_physical_gpu_id()
                if gpu not in handles:
                    return f"no policy rank is on its GPU {gpu} (of {', '.join(handles)})"
                self._opened_buffer = _open_ipc_handle(handles[gpu], self.device.index)
        buffer = self._opened_buffer
        if buffer is None:
            buffer = torch.empty(bucket.words, dtype=torch.int64, device=self.device)
            self._receive_broadcast(buffer)
        if not buckets.is_intact(bucket, buffer):
            return (
                "other bytes than were sent (by the checksum); use another machine or link if it "
                "happens again"
            )
        self._load_tensors(buckets.unpack(bucket, buffer), first, last)
        if last:
            self._opened_buffer = None
        return None

    def _receive_broadcast(self, buffer: torch.Tensor) -> None:
        group: Any = self._model_update_group
        group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())

    def _load_tensors(
        self, tensors: list[tuple[str, torch.Tensor]], first: bool, last: bool
    ) -> None:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if first:
                initialize_layerwise_reload(model)
            if self._opened_buffer is not None:
                # The trainer overwrites its buffer once this worker has answered, and a layer
                # keeps its tensors until the last of them has arrived.
                tensors = [(name, tensor.clone()) for name, tensor in tensors]
            # Loaders convert the dtype: an engine may be in float32, which represents every bf16.
            model.load_weights(tensors)
            if last:
                finalize_layerwise_reload(model, self.model_config)
                self.model_runner.reset_encoder_cache()
                self.model_runner.reset_mm_cache()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _open_ipc_handle(
    handle: tuple[Callable[..., torch.Tensor], tuple[Any, ...]], device_index: int
) -> torch.Tensor:
    """Another process's tensor on this worker's GPU, which may have another index there."""
    rebuild, given = handle
    arguments = list(given)
    arguments[6] = device_index  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
    return rebuild(*arguments)


def _loaded_binaries() -> dict[str, int]:
    """vLLM's compiled libraries in this process: path in the package -> size in bytes."""
    package = Path(vllm.__file__).parent
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    files = {Path(fields[5]) for fields in mapped if len(fields) == 6}
    return {
        str(file.relative_to(package)): file.stat().st_size
        for file in sorted(files)
        if file.suffix == ".so" and file.is_relative_to(package) and file.exists()
    }
