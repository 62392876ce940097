"""The engine's side of the weight sync in buckets: an extension of vLLM's worker.

After loading, vLLM changes the layout of weights: CPU linear layers and quantised ones are packed,
the experts of an MoE are reordered for their kernel. Tensors of a checkpoint cannot be written into
them. vLLM's layerwise reload rebuilds a layer once all of its tensors are there. It begins with the
first tensors of a sync and ends after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from sg_rlhf.overlay.weight_sync import buckets


class BucketWorkerWrap(WorkerWrap):
    """Upstream's extension, which can take many tensors at a time; each is checked, then loaded.

    vLLM adds it to the bases of its worker and refuses names that the worker has.
    """

    device: torch.device
    model_config: Any
    model_runner: Any
    vllm_config: Any
    _opened_buffer: Any = None

    def receive_bucket(
        self,
        wire: Sequence[Any],
        first: bool,
        last: bool,
        handles: dict[str, Any] | None = None,
    ) -> str | None:
        """Take one bucket of a sync and load its tensors.

        Args:
            wire: ``weight_buckets.to_wire`` of it.
            first: of the sync's buckets; those of a GPU shared with the trainer bring
            handles: of the buffers that all of them come in, by GPU.
            last: of the sync's buckets.

        Returns:
            None, or a line that says what is wrong with it: then nothing of it is loaded.
        """
        bucket = buckets.from_wire(wire)
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
            self._take_broadcast(buffer)
        damaged = buckets.corrupted_tensors(bucket, buffer)
        if damaged is not None:
            return (
                f"{', '.join(damaged)}: not what was sent (the checksum is another); take another "
                "machine or link if it happens again"
            )
        self._load_tensors(buckets.unpack(bucket, buffer), first, last)
        if last:
            self._opened_buffer = None
        return None

    def _take_broadcast(self, buffer: torch.Tensor) -> None:
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
                # The trainer writes over its buffer once this worker has answered, and a layer
                # keeps its tensors until the last of them comes.
                tensors = [(name, tensor.clone()) for name, tensor in tensors]
            # Loaders convert as they copy: an engine may be in float32, which holds every bf16.
            model.load_weights(tensors)
            if last:
                finalize_layerwise_reload(model, self.model_config)
                self.model_runner.reset_encoder_cache()
                self.model_runner.reset_mm_cache()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _open_ipc_handle(handle: Any, device_index: int) -> torch.Tensor:
    """Another process's tensor on this worker's GPU, which may have another number there."""
    rebuild, given = handle
    given = list(given)
    given[6] = device_index  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
    tensor: torch.Tensor = rebuild(*given)
    return tensor
