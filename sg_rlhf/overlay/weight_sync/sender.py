"""The trainer's side of the weight sync: a few buckets instead of a message per tensor.

Upstream sends tensor by tensor, each with a remote call to every engine: 434 round trips for 3B.
Here a bucket of 64 or 512 MiB (:mod:`.buckets`) is one call, one transfer and one load. The
transports are upstream's: a broadcast by NCCL (gloo on the CPU) from rank 0 to the workers of all
engines, or on a shared GPU one buffer, whose CUDA IPC handle is opened once per sync.

vLLM's own weight transfer does not run on the CPU, has neither a checksum nor a deadline, and under
ZeRO-3 would gather each parameter separately.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import deepspeed
import ray
import torch
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from ray import ObjectRef
from ray.actor import ActorHandle
from torch.multiprocessing.reductions import reduce_tensor
from vllm.device_allocator import alloc_conf

from sg_rlhf.config.derived.weight_sync import bucket_bytes
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.reporting.error_report import last_line
from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.rollout.engine_pool import engine_names, is_engine_failure
from sg_rlhf.overlay.settings.lookup import value_of
from sg_rlhf.overlay.weight_sync import buckets
from sg_rlhf.overlay.weight_sync.tensors import engine_tensors

#: The deadline: a constant for the start, plus the time of the bytes at a very slow rate.
#: The rate is a tenth of gloo's between two processes of one old machine.
BASE_SECONDS, BYTES_PER_SECOND = 120.0, 100e6
#: The controller waits this much longer than the trainer, whose error message is more precise.
GRACE_SECONDS = 30.0


def deadline_seconds(nbytes: int) -> float:
    """Seconds that a sync of so many bytes of weights may take."""
    return BASE_SECONDS + nbytes / BYTES_PER_SECOND


class SyncedRank(Protocol):
    """What a weight sync reads of a rank of the policy."""

    strategy: Strategy
    actor: PolicyModel
    vllm_engines: list[ActorHandle] | None
    use_cuda_ipc: bool
    #: vLLM's communicator, or gloo's; on rank 0.
    _model_update_group: Any


class WeightSync:
    """Sends the policy's weights to the engines; every rank calls :meth:`send` together."""

    def __init__(self, trainer: SyncedRank) -> None:
        """Plan the buckets."""
        args = trainer.strategy.args
        self._trainer = trainer
        self._zero3 = args.ds.zero_stage == 3
        self._ipc = trainer.use_cuda_ipc
        self._clears_cache = args.vllm.enable_prefix_caching
        # As upstream: a vision-language model's vision part is frozen, and the engine has its own.
        is_vlm = getattr(trainer.actor, "is_vlm", False)
        self._sources = engine_tensors(trainer.actor.model.module, without_frozen=is_vlm)
        tensors = [
            buckets.TensorSpec(name, source.parameters[0].dtype, source.shape)
            for name, source in self._sources.items()
        ]
        self.buckets = buckets.split(tensors, bucket_bytes(value_of(args)))
        self.deadline_seconds = deadline_seconds(sum(tensor.nbytes for tensor in tensors))

    def send(self) -> None:
        """Send all weights once.

        Raises SyncError on rank 0, in one line, for an engine that did not answer in time, failed,
        or received something else. The other ranks then wait until the run ends.
        """
        self._started = time.monotonic()
        rank0 = torch.distributed.get_rank() == 0
        if rank0 and self._clears_cache:
            self._call_engines("clear its prefix cache", "reset_prefix_cache")
        torch.cuda.empty_cache()
        buffer = self._buffer() if rank0 or self._ipc else None
        handles = self._handles(buffer) if self._ipc else None
        for index, bucket in enumerate(self.buckets):
            self._send_bucket(index, bucket, buffer, handles)
        del buffer
        if self._ipc:
            # The engines have closed it: its memory is free again.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()

    def _buffer(self) -> torch.Tensor:
        words = max(bucket.words for bucket in self.buckets)
        with _plain_segments() if self._ipc else contextlib.nullcontext():
            return torch.empty(words, dtype=torch.int64, device=torch.cuda.current_device())

    def _handles(self, buffer: torch.Tensor | None) -> dict[str, Any]:
        """Physical GPU -> handle of the buffer of the rank on it; an engine opens its GPU's."""
        per_rank: list[Any] = [None] * torch.distributed.get_world_size()
        gpu = get_physical_gpu_id()
        handle = {gpu: reduce_tensor(buffer)}  # type: ignore[no-untyped-call]
        torch.distributed.all_gather_object(per_rank, handle)
        return {gpu: handle for handles in per_rank for gpu, handle in handles.items()}

    def _send_bucket(
        self,
        index: int,
        bucket: buckets.Bucket,
        buffer: torch.Tensor | None,
        handles: dict[str, Any] | None,
    ) -> None:
        sources = [self._sources[slot.tensor.name] for slot in bucket.slots]
        # The parts of a stacked parameter share it; it is gathered once.
        parameters = list({id(p): p for source in sources for p in source.parameters}.values())
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._zero3):
            if buffer is not None:
                # A generator: merged tensors are copies, and one at a time is enough.
                buckets.pack(bucket, (source.materialize() for source in sources), buffer)
        if self._ipc:  # every engine reads the buffer of the rank on its GPU
            torch_dist_barrier_and_cuda_sync()
        if torch.distributed.get_rank() == 0:
            assert buffer is not None
            self._call_engines(
                f"take bucket {index + 1} of {len(self.buckets)} ({_bucket_label(bucket)})",
                "receive_bucket",
                buckets.metadata(bucket),
                first=index == 0,
                last=index == len(self.buckets) - 1,
                handles=handles if index == 0 else None,
                broadcast=None if self._ipc else buffer[: bucket.words],
            )
        if self._ipc:  # before the next bucket overwrites this one
            torch_dist_barrier_and_cuda_sync()

    def _call_engines(
        self,
        action: str,
        method: str,
        *args: Any,
        broadcast: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Call a method of every engine, broadcast meanwhile, wait; "engine 0 did not {action}"."""
        pending = {
            getattr(engine, method).remote(*args, **kwargs): index
            for index, engine in enumerate(self._trainer.vllm_engines or ())
        }
        work = None if broadcast is None else self._start_broadcast(broadcast)
        while pending:
            remaining = self.deadline_seconds - (time.monotonic() - self._started)
            done, _ = ray.wait(list(pending), timeout=max(remaining, 0.0))
            if not done:
                raise SyncError(
                    _timeout_message(sorted(pending.values()), action, self.deadline_seconds)
                )
            index = pending.pop(done[0])
            error = _error_of(done[0])
            if error:
                raise SyncError(f"weight sync: engine {index} did not {action}: {error}")
        if work is not None:
            work.wait()

    def _start_broadcast(self, buffer: torch.Tensor) -> Any:
        """Begin to send. NCCL's broadcast runs in the stream that writes the next bucket."""
        group = self._trainer._model_update_group
        start = getattr(group, "start_broadcast", group.broadcast)
        return start(buffer, src=0, stream=torch.cuda.current_stream())


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate GPU memory by cudaMalloc meanwhile, whatever ``PYTORCH_CUDA_ALLOC_CONF`` says.

    Docker's default seccomp profile forbids pidfd_getfd, by which another process would get the
    handle of an expandable segment.
    """
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    off = alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False)
    alloc_conf.set_alloc_conf(off)
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(before)


def _error_of(reference: ObjectRef) -> str | None:
    """One line with the error in an engine's answer: each of its workers returns None or a line."""
    try:
        answers = ray.get(reference)
    except ray.exceptions.RayError as error:
        if is_engine_failure(error):
            return "it is lost (killed, or crashed)"
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        return ": ".join([type(cause).__name__, *([last_line(lines)] if lines else [])])
    return next((line for line in answers or [] if line), None)


def _timeout_message(engines: Sequence[int], action: str, seconds: float) -> str:
    return (
        f"weight sync: {engine_names(engines)} did not {action} within {seconds:g} s: stopped, "
        "out of memory or disconnected from the trainer (logs/)"
    )


def _bucket_label(bucket: buckets.Bucket) -> str:
    first, last = bucket.slots[0].tensor.name, bucket.slots[-1].tensor.name
    return first if first == last else f"{first} to {last}"
