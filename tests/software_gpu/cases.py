"""The cases: what each one runs on how many devices, and what it proves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PIPELINE = "tests.gpu.random_pipeline"


def colocated(ranks: int, engines: int) -> tuple[str, ...]:
    """Policy and reference with a ZeRO-3 rank on each of the first devices, and so many engines."""
    return (
        "ds.zero_stage=3", f"actor.num_gpus_per_node={ranks}", f"ref.num_gpus_per_node={ranks}",
        f"vllm.num_engines={engines}",
    )  # fmt: skip


#: Policy and reference on the first device, the engine on the second, nothing sleeps.
APART = (
    *colocated(1, 1), "train.colocate_all=false", "train.colocate_actor_ref=true",
    "vllm.enable_sleep=false", "ds.enable_sleep=false",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: on the command line, and of its result.
        proves: one line.
        module: has ``run(record, job)``, as a stage of tests/gpu.
        devices: of the machine.
        gib: memory of each device.
        overrides: key=value of the recipe, for a pipeline.
        values: operations compute their values; else kernels do nothing.
        minutes: after which it is ended.
        short: one of those of ``--short``.
        large: tensors above some size have no values, so that models fit whose memory is measured.
    """

    name: str
    proves: str
    module: str
    devices: int = 1
    gib: float = 4.0
    overrides: tuple[str, ...] = ()
    values: bool = True
    minutes: int = 15
    short: bool = False
    large: bool = False


CASES = (
    Case(
        "imports", "every module of the overlay imports, every patch finds its place in upstream",
        "tests.software_gpu.imports", values=False, minutes=5, short=True,
    ),
    Case(
        "device",
        "the device: memory, IPC, NCCL, NVML; its values: as PyTorch's on the CPU; kernels compile",
        "tests.software_gpu.own_tests", devices=4, minutes=10, short=True,
    ),
    Case("a", "losses never wait for the host; values as on the CPU", "tests.gpu.algo"),
    Case("b", "packed attention and fused log-probs", "tests.gpu.attention_and_head"),
    Case("c", "ZeRO-3: step, offload, save, load, resume, NaN watch", "tests.gpu.zero3"),
    Case("d", "weights over CUDA IPC, bit for bit", "tests.gpu.ipc"),
    Case(
        "pipeline", "sampling, sleep, wake-up, ZeRO-2, weight sync over CUDA IPC on one device",
        PIPELINE, short=True,
    ),
    Case(
        "offload", "the shipped settings of one GPU: ZeRO-2, the optimizer in host memory",
        PIPELINE, overrides=("ds.adam_offload=true",),
    ),
    Case(
        "two", "2 ZeRO-3 ranks and 2 engines on 2 devices: NCCL calls match, IPC by device",
        PIPELINE, devices=2, overrides=colocated(2, 2),
    ),
    Case(
        "four", "the same on 4 devices",
        PIPELINE, devices=4, minutes=25,
        overrides=(*colocated(4, 4), "train.micro_batch_size=2"),
    ),
    Case(
        "tensor_parallel", "one engine on 2 devices (tensor parallel 2) beside 2 ZeRO-3 ranks",
        PIPELINE, devices=2,
        overrides=(*colocated(2, 1), "vllm.tensor_parallel_size=2"),
    ),
    Case(
        "apart", "policy and engine on a device each: weight sync over NCCL",
        PIPELINE, devices=2, overrides=APART,
    ),
    Case(
        "async", "the same, sampling while the policy trains",
        PIPELINE, devices=2,
        overrides=(*APART, "train.async_enable=true", "sg.correction=tis"),
    ),
    Case(
        "pretrained", "SmolLM2-135M-Instruct: its tokenizer, its chat template, a tied embedding",
        "tests.software_gpu.pretrained", gib=10.0, minutes=25,
    ),
    Case(
        "lora", "LoRA: only the adapters train, the merged weights reach the engine",
        "tests.software_gpu.lora",
    ),
    Case(
        "resume", "killed on 2 devices, resumed from its checkpoint on 1",
        "tests.software_gpu.resume", devices=2, minutes=20,
    ),
    Case(
        "memory", "peaks of 3B and 7B recipes beside the plan; no wait of the host in a layer",
        "tests.gpu.memory_peaks", gib=79.1, large=True, minutes=30,
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def chosen(names: Iterable[str], short: bool) -> list[Case]:
    """The cases of these names in the table's order; all of them, or the short ones, for none.

    Raises:
        ValueError: no such case.
    """
    names = list(names)
    for name in names:
        if name not in BY_NAME:
            raise ValueError(f"case {name!r}: expected one of {', '.join(BY_NAME)}")
    if names:
        return [case for case in CASES if case.name in names]
    return [case for case in CASES if case.short or not short]


def table() -> str:
    """The table of the README."""
    lines = ["| case | devices | proves |", "|---|--:|---|"]
    lines += [f"| {case.name} | {case.devices} | {case.proves} |" for case in CASES]
    return "\n".join(lines)
