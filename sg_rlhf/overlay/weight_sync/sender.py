"""The trainer's side of the weight sync: a few checked buckets instead of a message per tensor.

Upstream sends tensor by tensor, each with a remote call to every engine, or on a shared GPU with
a handle gathered from every rank and a barrier: 434 round trips for a model of 0.5B, whatever its
size. Here tensors travel together in buckets of ``sg.sync_bucket_mb``: one call to every engine,
one transfer and one load for each, with sums that show damage (:mod:`.weight_buckets`). The
transports are upstream's: a broadcast by NCCL (or gloo, on the CPU) from rank 0 to all engines'
workers, or on a shared GPU one handle of one buffer, opened once per sync.

Why not vLLM's own weight transfer (0.29, ``vllm.distributed.weight_transfer``), which packs too:

- its backends are NCCL, CUDA IPC, sparse NCCL and RDMA: none for the CPU, where this overlay is
  tested and its small runs train;
- it has neither sums nor a deadline: its sender waits in the broadcast for a worker that never
  comes, and its own comments say that an error leaves a thread behind;
- its trainer iterates over parameters that are whole one after the other, so that ZeRO-3 would
  gather as often as now; and its NCCL buffers are cut by size on both sides independently;
- a backend of our own would register there what the worker extension below holds anyway, and a
  second code path for every difference.

What it does once a bucket is there, the layerwise reload, is what the CPU's worker uses as well
(:mod:`sg_rlhf.overlay.weight_sync.cpu_receiver`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import deepspeed
import ray
import torch
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from torch.multiprocessing.reductions import reduce_tensor

from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.rollout.dispatch import is_engine_failure
from sg_rlhf.overlay.weight_sync import buckets as weight_buckets
from sg_rlhf.overlay.weight_sync.tensors import engine_tensors

#: A deadline by size: what a start of everything may take, and the slowest transfer that is not
#: taken for a hang. A tenth of gloo's rate between two processes of one old machine.
LEAST_SECONDS, BYTES_PER_SECOND = 120.0, 100e6
#: The controller waits this much longer than the trainer, which knows more to say.
GRACE_SECONDS = 30.0


def deadline_seconds(setting: float, nbytes: int) -> float:
    """Seconds that a sync may take: ``sg.sync_timeout``, or by the size of the weights if 0."""
    return setting or LEAST_SECONDS + nbytes / BYTES_PER_SECOND


def uses_buckets(args: Any) -> bool:
    """Whether this run syncs in buckets; DeepSpeed's tensor parallelism keeps upstream's loop."""
    return args.sg.weight_sync == "buckets" and args.ds.tensor_parallel_size <= 1


class WeightSync:
    """Sends the policy's weights to the engines; every rank calls :meth:`send` together."""

    def __init__(self, trainer: Any) -> None:
        """Plan the buckets.

        Args:
            trainer: upstream's trainer of the policy, whose group of the sync exists.
        """
        args = trainer.strategy.args
        self._trainer = trainer
        self._zero3 = args.ds.zero_stage == 3
        self._ipc = trainer.use_cuda_ipc
        self._clears_cache = args.vllm.enable_prefix_caching
        # Upstream's choice: the vision part of a model of images is frozen, and the engine's own.
        is_vlm = getattr(trainer.actor, "is_vlm", False)
        self._sources = engine_tensors(trainer.actor.model.module, without_frozen=is_vlm)
        firsts: dict[str, Any] = {n: source.parameters[0] for n, source in self._sources.items()}
        tensors = [
            weight_buckets.Tensor(name, p.dtype, tuple(p.ds_shape if self._zero3 else p.shape))
            for name, p in firsts.items()
        ]
        self.buckets = weight_buckets.split(tensors, args.sg.sync_bucket_mb * 2**20)
        self.deadline_seconds = deadline_seconds(
            args.sg.sync_timeout, sum(tensor.nbytes for tensor in tensors)
        )

    def send(self) -> None:
        """One sync.

        Raises:
            SyncError: on rank 0, in one line: an engine that did not answer in time, failed, or
                received something else than was sent. The other ranks then wait for the run's end.
        """
        self._started = time.monotonic()
        rank0 = torch.distributed.get_rank() == 0
        if rank0 and self._clears_cache:
            self._await("clear its prefix cache", "reset_prefix_cache")
        torch.cuda.empty_cache()
        buffer = self._buffer() if rank0 or self._ipc else None
        handles = self._handles(buffer) if self._ipc else None
        for index, bucket in enumerate(self.buckets):
            self._send_bucket(index, bucket, buffer, handles)
        del buffer
        if self._ipc:
            torch.cuda.ipc_collect()  # the engines have closed it: its memory is free again
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()

    def _buffer(self) -> torch.Tensor:
        words = max(bucket.words for bucket in self.buckets)
        return torch.empty(words, dtype=torch.int64, device=torch.cuda.current_device())

    def _handles(self, buffer: torch.Tensor | None) -> dict[str, Any]:
        """Every rank's buffer, by the GPU that it is on; an engine opens that of its own."""
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, {get_physical_gpu_id(): reduce_tensor(buffer)})
        return {gpu: handle for of_rank in found for gpu, handle in of_rank.items()}

    def _send_bucket(
        self,
        index: int,
        bucket: weight_buckets.Bucket,
        buffer: torch.Tensor | None,
        handles: dict[str, Any] | None,
    ) -> None:
        sources = [self._sources[slot.tensor.name] for slot in bucket.slots]
        parameters = [parameter for source in sources for parameter in source.parameters]
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._zero3):
            if buffer is not None:
                # One after the other: merged tensors are copies.
                weight_buckets.pack(bucket, (source.value() for source in sources), buffer)
        if self._ipc:  # every engine reads what the rank on its own GPU has written
            torch_dist_barrier_and_cuda_sync()
        if torch.distributed.get_rank() == 0:
            assert buffer is not None
            self._await(
                f"take bucket {index + 1} of {len(self.buckets)} ({_bucket_label(bucket)})",
                "receive_bucket",
                weight_buckets.metadata(bucket),
                first=index == 0,
                last=index == len(self.buckets) - 1,
                handles=handles if index == 0 else None,
                sent=None if self._ipc else buffer[: bucket.words],
            )
        if self._ipc:  # before the next bucket takes its place
            torch_dist_barrier_and_cuda_sync()

    def _await(self, what: str, method: str, *args: Any, sent: Any = None, **kwargs: Any) -> None:
        """Call every engine, send a buffer meanwhile, and wait until all have answered."""
        engines = self._trainer.vllm_engines
        answers = {
            getattr(engine, method).remote(*args, **kwargs): number
            for number, engine in enumerate(engines)
        }
        work = None if sent is None else self._start_broadcast(sent)
        while answers:
            left = self.deadline_seconds - (time.monotonic() - self._started)
            done, _ = ray.wait(list(answers), timeout=max(left, 0.0))
            if not done:
                raise SyncError(
                    _timeout_message(sorted(answers.values()), what, self.deadline_seconds)
                )
            number = answers.pop(done[0])
            problem = _error_of(done[0])
            if problem:
                raise SyncError(f"weight sync: engine {number} did not {what}: {problem}")
        if work is not None:
            work.wait()

    def _start_broadcast(self, buffer: torch.Tensor) -> Any:
        """Begin to send. NCCL's goes on in the stream that writes the next bucket."""
        group = self._trainer._model_update_group
        start = getattr(group, "start_broadcast", group.broadcast)
        return start(buffer, src=0, stream=torch.cuda.current_stream())


def _error_of(reference: Any) -> str | None:
    """What is wrong with an engine's answer: its workers each say None or a line."""
    try:
        said = ray.get(reference)
    except ray.exceptions.RayError as error:
        if is_engine_failure(error):
            return "it is lost (killed, or crashed)"
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        return ": ".join([type(cause).__name__, *lines[-1:]])
    return next((line for line in said or [] if line), None)


def _timeout_message(engines: Sequence[int], what: str, seconds: float) -> str:
    names = f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"
    return (
        f"weight sync: {names} did not {what} within {seconds:g} s: stopped, out of memory or cut "
        "off from the trainer (logs/); raise sg.sync_timeout if the link is that slow"
    )


def _bucket_label(bucket: weight_buckets.Bucket) -> str:
    first, last = bucket.slots[0].tensor.name, bucket.slots[-1].tensor.name
    return first if first == last else f"{first} to {last}"
