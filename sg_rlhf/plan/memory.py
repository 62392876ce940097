"""Whether a run fits: memory of a GPU and of a node in each phase, and disk.

The lines are in `gpu_memory` and `host_memory`; here they are put together. The largest phase of a
rollout decides. All of it is the worst case: every sample as long as ``data.max_len`` allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan import host_memory as host
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.hardware import Hardware
from sg_rlhf.plan.run_shape import RunShape

PHASES = ("load", "sample", "score", "update", "sync")
#: A phase that leaves less than this share of the GPU may still fail, by fragmentation.
TIGHT = 0.05


class Moment(NamedTuple):
    """A moment of a phase and what is in memory then, bytes by line."""

    phase: str
    lines: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.lines.values())


class Cache(NamedTuple):
    """vLLM's keys and values.

    Attributes:
        gib: of one GPU.
        sequences: of ``data.max_len`` that fit at a time in one engine.
        wanted: what one engine is given of a rollout, or 128, vLLM's limit.
    """

    gib: float
    sequences: float
    wanted: int


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes, beside what there is.

    Attributes:
        run: the run.
        hardware: the machine.
        moments: for each phase its largest moment on a GPU; of the CPU, none.
        host: bytes of a node by line.
        disk: bytes by line.
        cache: vLLM's keys and values; None without GPUs.
        problems: why it does not fit, one line each.
        remarks: what a user should know beside that.
        train_micro: the largest ``train.micro_batch_size`` that fits and divides the batch; 0 if
            not even 1 does.
        rollout_micro: the same of ``rollout.micro_batch_size``.
    """

    run: RunShape
    hardware: Hardware
    moments: Mapping[str, Moment]
    host: Mapping[str, float]
    disk: Mapping[str, float]
    cache: Cache | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    train_micro: int
    rollout_micro: int

    @property
    def fits(self) -> bool:
        """Whether nothing stands against it."""
        return not self.problems

    @property
    def peak_phase(self) -> str:
        """The phase that takes most of a GPU; "" without GPUs."""
        return max(self.moments, key=lambda phase: self.moments[phase].total, default="")

    @property
    def peak_gib(self) -> float:
        """GPU memory of that phase."""
        return self.moments[self.peak_phase].total / GIB if self.moments else 0.0

    @property
    def host_gib(self) -> float:
        """Memory of a node."""
        return sum(self.host.values()) / GIB

    @property
    def disk_gb(self) -> float:
        """Disk of a run at its end, GB (1e9)."""
        return sum(self.disk.values()) / 1e9

    def lines(self) -> list[str]:
        """The plan as text; see :mod:`sg_rlhf.plan.text`."""
        from sg_rlhf.plan.text import memory_lines

        return memory_lines(self)


def moments(run: RunShape, hardware: Hardware) -> list[Moment]:
    """What one of the policy's GPUs holds, moment by moment."""
    weights = {"policy and reference, bf16": gpu.policy(run) + gpu.reference(run)}
    states = {
        "fp32 master and Adam's moments": gpu.optimizer(run),
        "gradient shard": gpu.gradients(run),
    }
    bucket = {"gradient buckets": gpu.bucket(run)}
    asleep = run.trainer_sleeps and not run.adam_offload
    resident = weights if asleep else weights | states | bucket
    contexts = {"CUDA contexts, NCCL": gpu.contexts(run)}
    engine_off, engine_weights, engine_on = _engine(run, hardware)
    training = contexts | weights | states | engine_off
    gathered = {"layers gathered by ZeRO-3": gpu.gathered(run)}
    reduction = {"gradient buckets": gpu.bucket(run) + gpu.reduction(run)}
    kept = gpu.checkpoints(run)
    return [
        Moment(
            "load",
            training | {"gradient buckets": gpu.bucket(run) + gpu.building(run)},
        ),
        Moment("sample", contexts | resident | engine_on),
        Moment(
            "score",
            contexts
            | resident
            | engine_off
            | gathered
            | {"activations": gpu.scoring_layer(run), "logits": gpu.logits_of_scoring(run)},
        ),
        Moment(
            "update",
            training
            | gathered
            | {"gradient buckets": gpu.bucket(run) + gpu.largest_gradient(run)}
            | {"activations": kept, "logits": gpu.logits_of_update(run)},
        ),
        Moment(
            "update",
            training
            | gathered
            | reduction
            | {
                "activations": kept + gpu.recomputed_layer(run),
                "logits": gpu.logits_in_layers(run),
            },
        ),
        Moment(
            "update",
            training | {"gradient buckets": gpu.bucket(run) + gpu.optimizer_step(run)},
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
    name = "vLLM"
    if not run.colocated or not run.engines:
        return {}, {}, {}
    awake = {name: gpu.engine_awake(run, hardware)}
    if not run.engines_sleep:
        return awake, awake, awake
    asleep = gpu.engine_asleep(run)
    return {name: asleep}, {name: asleep + gpu.engine_weights(run)}, awake


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
    wanted = -(-run.samples // max(1, run.engines))
    return Cache(
        gib=free / GIB,
        sequences=max(0.0, free / per_sequence),
        wanted=min(wanted, gpu.ENGINE_SEQUENCES),
    )


def host_lines(run: RunShape) -> dict[str, float]:
    """What a node holds, bytes by line."""
    lines = {
        "Python processes": host.processes(run),
        "vLLM's sleep backup": host.sleep_backup(run),
        "optimizer states (offloaded)": host.optimizer_states(run),
        "reference or average (offloaded)": host.offloaded_weights(run),
        "model file, in the page cache": host.model_file(run),
        "weights being saved": host.consolidated(run),
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
            "vLLM's weights": gpu.engine_weights(run) * run.engines,
        }
    return {name: size for name, size in lines.items() if size}


def disk_lines(run: RunShape) -> dict[str, float]:
    """What a run leaves on disk, bytes by line; one folder more while the next is written."""
    kept = run.keep + 1 + run.best if run.save_steps else 0
    lines = {
        f"{kept} DeepSpeed folders": kept * host.deepspeed_folder(run) * run.save_optimizer,
        f"{kept} Hugging Face folders": kept * host.hugging_face_folder(run) * run.save_hf,
        "the trained model": host.hugging_face_folder(run),
        "the model's download": 0.0 if run.local_model else host.model_file(run),
        "logs, samples, pictures": host.LOGS,
    }
    return {name: size for name, size in lines.items() if size}


def memory_plan(run: RunShape, hardware: Hardware) -> MemoryPlan:
    """What a run takes of a machine.

    Args:
        run: from :func:`sg_rlhf.plan.run_shape.run_shape`.
        hardware: the machine; for a run without GPUs only its host counts.
    """
    on_gpu = {} if run.cpu else largest(moments(run, hardware))
    cache = None if run.cpu or not run.engines else cache_of(run, hardware)
    plan = MemoryPlan(
        run=run,
        hardware=hardware,
        moments=on_gpu,
        host=host_lines(run),
        disk=disk_lines(run),
        cache=cache,
        problems=(),
        remarks=(),
        train_micro=_largest_micro(run, hardware, "train_micro", "update"),
        rollout_micro=_largest_micro(run, hardware, "rollout_micro", "score"),
    )
    return replace(plan, problems=tuple(_problems(plan)), remarks=tuple(_remarks(plan)))


def _largest_micro(run: RunShape, hardware: Hardware, field: str, phase: str) -> int:
    """The largest micro-batch of a phase that divides its batch and fits."""
    if run.cpu:
        return int(getattr(run, field))
    batch = run.train_batch if field == "train_micro" else run.samples
    of_rank = max(1, batch // run.data_parallel)
    for size in range(of_rank, 0, -1):
        if of_rank % size:
            continue
        if run.train_tokens:  # by tokens, whatever the number
            return int(getattr(run, field))
        found = largest(moments(replace(run, **{field: size}), hardware))
        if found[phase].total <= hardware.gpu_memory_gib * GIB:
            return size
    return 0


def _problems(plan: MemoryPlan) -> Iterable[str]:
    run, hardware = plan.run, plan.hardware
    if not run.cpu:
        yield from _gpu_problems(plan)
    if plan.host_gib > hardware.host_memory_gib:
        yield (
            f"host memory: {plan.host_gib:.0f} GiB a node, "
            f"{plan.host_gib - hardware.host_memory_gib:.0f} GiB more than there are"
        )
    free = hardware.disk_free_gb
    if free is not None and plan.disk_gb > free:
        yield f"disk: {plan.disk_gb:.0f} GB, {plan.disk_gb - free:.0f} GB more than are free"


def _gpu_problems(plan: MemoryPlan) -> Iterable[str]:
    run, hardware = plan.run, plan.hardware
    gpus = run.ranks if run.colocated else run.ranks + run.engines * run.engine_tp
    if gpus > hardware.gpus:
        yield f"GPUs: {gpus}, and there are {hardware.gpus}"
    for phase, moment in plan.moments.items():
        over = moment.total / GIB - hardware.gpu_memory_gib
        if over <= 0:
            continue
        line = f"{phase}: {moment.total / GIB:.1f} GiB a GPU, {over:.1f} GiB too much"
        key, size = {
            "update": ("train.micro_batch_size", plan.train_micro),
            "score": ("rollout.micro_batch_size", plan.rollout_micro),
        }.get(phase, ("", 0))
        if size:
            line += f"; {key}={size} is the largest that fits"
        elif key:
            line += f"; no {key} fits"
        elif phase == "sample":
            line += "; a smaller vllm.gpu_memory_utilization leaves room"
        yield line
    cache = plan.cache
    if cache and cache.sequences < 1:
        yield (
            f"vLLM: {cache.gib:.1f} GiB for keys and values, less than one sequence of "
            f"data.max_len={run.max_len}; vllm.tensor_parallel_size or "
            "vllm.gpu_memory_utilization must be larger"
        )


def _remarks(plan: MemoryPlan) -> Iterable[str]:
    run, hardware, cache = plan.run, plan.hardware, plan.cache
    tight = [
        phase
        for phase, moment in plan.moments.items()
        if 0 <= hardware.gpu_memory_gib - moment.total / GIB < TIGHT * hardware.gpu_memory_gib
        and phase != "sample"
    ]
    if tight:
        yield f"tight: {', '.join(tight)} leaves less than {TIGHT:.0%} for fragmentation"
    if cache and 1 <= cache.sequences < cache.wanted:
        yield (
            f"vLLM: {cache.sequences:.0f} of an engine's {cache.wanted} sequences run at a time "
            "if all are as long as they may be; the others wait"
        )
    if not run.cpu and run.train_tokens is None and plan.train_micro > run.train_micro:
        yield f"train.micro_batch_size={plan.train_micro} would fit"
