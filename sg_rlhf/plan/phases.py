"""What is in memory at each moment of a rollout, line by line, and on disk at the end of a run.

The lines are in `gpu_memory` and `host_memory`; here they are put together. All of it is the worst
case: every sample as long as ``data.max_len`` allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan import host_memory as host
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.sampling.vllm_settings import CPU_CACHE

#: Lines that other processes than the policy's hold.
CONTEXTS, ENGINE = "CUDA contexts, NCCL", "vLLM"
#: Memory that is in use and holds no tensor.
GAPS = "gaps in the allocator's blocks"
#: The memory of every process without a model.
PROCESSES = "Python processes"
#: On disk in the hub's cache, and not in the run directory.
DOWNLOAD = "the model's download"


class Moment(NamedTuple):
    """What is in memory in a moment of a phase, bytes by line."""

    phase: str
    lines: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.lines.values())


class Cache(NamedTuple):
    """vLLM's keys and values."""

    gib: float  # of one GPU
    sequences: float  # of data.max_len that fit at a time in one engine
    wanted: int  # sequences of a rollout in one engine, up to vLLM's limit


def tensors(lines: dict[str, float]) -> float:
    """Bytes of the tensors of policy and reference."""
    return sum(size for name, size in lines.items() if name not in (CONTEXTS, ENGINE, GAPS))


def moments(run: RunShape, hardware: Hardware) -> list[Moment]:
    """What one of the policy's GPUs holds, moment by moment."""

    def passes(phase: str, lines: dict[str, float]) -> Moment:
        """Tensors of many sizes come and go."""
        return Moment(phase, lines | {GAPS: gpu.GAPS * tensors(lines)})

    weights = {"policy and reference, bf16": gpu.policy(run) + gpu.reference(run)}
    states = {
        "fp32 master and Adam's moments": gpu.optimizer(run),
        "gradient shard": gpu.gradients(run),
    }
    bucket = {"gradient buckets": gpu.BUCKET}
    asleep = run.trainer_sleeps and not run.adam_offload
    if run.zero_stage < 2:  # its gradients are gone after the step
        kept_states = {name: size for name, size in states.items() if name != "gradient shard"}
    else:
        kept_states = states
    resident = weights if asleep else weights | kept_states | bucket
    contexts = {CONTEXTS: gpu.contexts(run)}
    engine_off, engine_weights, engine_on = _engine(run, hardware)
    training = contexts | weights | states | engine_off
    gathered = {"layers gathered by ZeRO-3": gpu.gathered(run)}
    reduction = {"gradient buckets": gpu.BUCKET + gpu.reduction(run)}
    kept = gpu.checkpoints(run)
    return [
        Moment(
            "load",
            training | {"gradient buckets": gpu.BUCKET + gpu.building(run)},
        ),
        Moment("sample", contexts | resident | engine_on),
        passes(
            "score",
            contexts
            | resident
            | engine_off
            | {
                "layers gathered by ZeRO-3": gpu.gathered_in_scoring(run),
                "activations": gpu.scoring_layer(run),
                "logits": gpu.logits_of_scoring(run),
            },
        ),
        passes(
            "update",
            training
            | gathered
            | {"gradient buckets": gpu.BUCKET + gpu.largest_gradient(run)}
            | {"activations": kept, "logits": gpu.logits_of_update(run)},
        ),
        passes(
            "update",
            training
            | gathered
            | reduction
            | {
                "activations": kept + gpu.recomputed_layer(run),
                "logits": gpu.logits_in_layers(run),
            },
        ),
        passes(
            "update",
            # ZeRO-1 and 2 have dropped the bucket by then.
            training
            | {
                "gradient buckets": (gpu.BUCKET if run.zero_stage == 3 else 0.0)
                + gpu.optimizer_step(run)
            },
        ),
        Moment(
            "sync",
            contexts
            | resident
            | engine_weights
            | {"layers gathered by ZeRO-3": gpu.sync_buffers(run)},
        ),
    ]


def _engine(
    run: RunShape, hardware: Hardware
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """vLLM's line while it sleeps, has its weights alone, and samples."""
    if not run.colocated:
        return {}, {}, {}
    awake = {ENGINE: gpu.engine_awake(run, hardware)}
    if not run.engines_sleep:
        return awake, awake, awake
    asleep = gpu.engine_asleep(run)
    return {ENGINE: asleep}, {ENGINE: asleep + gpu.engine_weights(run)}, awake


def largest(of: Iterable[Moment]) -> dict[str, Moment]:
    """The largest moment of each phase."""
    found: dict[str, Moment] = {}
    for moment in of:
        if moment.phase not in found or moment.total > found[moment.phase].total:
            found[moment.phase] = moment
    return found


def cache_of(run: RunShape, hardware: Hardware) -> Cache:
    """vLLM's keys and values on this hardware."""
    free = gpu.kv_cache(run, hardware)
    per_sequence = gpu.kv_bytes_per_token(run) * run.max_len
    wanted = -(-run.samples // run.engines)
    return Cache(
        gib=free / GIB,
        sequences=max(0.0, free / per_sequence),
        wanted=min(wanted, gpu.engine_sequences(hardware)),
    )


def host_lines(run: RunShape) -> dict[str, float]:
    """What a node holds, bytes by line."""
    lines = {
        PROCESSES: host.processes(run),
        "vLLM's sleep backup": host.sleep_backup(run),
        "optimizer states (offloaded)": host.optimizer_states(run),
        "reference or average (offloaded)": host.offloaded_weights(run),
        "model being loaded or saved": max(host.model_file(run), host.consolidated(run)),
        "Ray's object store (/dev/shm)": host.object_store(run),
    }
    if run.cpu:
        ranks = run.gpus_per_node
        lines |= {
            "vLLM's sleep backup": 0.0,
            "optimizer states (offloaded)": 0.0,
            "weights, gradients, Adam's states": (
                (gpu.policy(run) + gpu.reference(run)) * ranks
                + 12.0 * run.trainable
                + gpu.gradients(run) * ranks
            ),
            "activations and logits": ranks
            * max(
                gpu.checkpoints(run) + gpu.logits_of_update(run),
                gpu.scoring_layer(run) + gpu.logits_of_scoring(run),
            ),
            "vLLM's weights and cache": (gpu.engine_weights(run) + CPU_CACHE) * run.engines,
        }
    return {name: size for name, size in lines.items() if size}


def disk_lines(run: RunShape) -> dict[str, float]:
    """What a run leaves on disk, bytes by line; one folder more while the next is written."""
    kept = run.keep + 1 + run.best if run.save_steps else 0
    lines = {
        f"{kept} DeepSpeed folders": kept * host.deepspeed_folder(run) * run.save_optimizer,
        f"{kept} Hugging Face folders": kept * host.hugging_face_folder(run) * run.save_hf,
        "the trained model": host.hugging_face_folder(run),
        DOWNLOAD: 0.0 if run.local_model else host.model_file(run),
        "logs, samples, pictures": host.LOGS,
    }
    return {name: size for name, size in lines.items() if size}
