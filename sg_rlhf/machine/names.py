"""Names of hardware (``cpu``, ``8x80gb``, ``2x8xh100``) and what follows from them.

The one grammar of ``--hardware`` and ``SG_HARDWARE``, the GPU types with their data-sheet figures,
the sizes that recipes have settings for, and those settings.

Imports the standard library alone and runs on Python 3.8, because scripts/bootstrap.sh runs this
file before anything is installed: ``python3 sg_rlhf/machine/names.py`` prints ``cpu`` or ``cuda``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Memory in a hardware name, GB -> least MiB that such a GPU reports (an A10 of 24 GB: 23,028).
SIZES = {80: 75_000, 40: 39_000, 24: 22_000}
#: GPUs of a node that a run can use: a rollout's batches divide over these.
COUNTS = (8, 4, 2, 1)
#: Models that the recipes train: the shipped tiny ones, and up to 1B, 3B and 8B parameters.
TINY, UP_TO_1B, UP_TO_3B, UP_TO_8B = "tiny", "1b", "3b", "8b"
#: The same from the smallest to the largest -> what they are.
MODELS = {
    TINY: "the tiny models",
    UP_TO_1B: "up to 1B parameters",
    UP_TO_3B: "up to 3B parameters",
    UP_TO_8B: "up to 8B parameters",
}
#: Host memory in GiB that the largest models need: of a node, and for each of its GPUs. Optimizer
#: states, the sleeping engines' weights and Python itself are there. Fitted to `sg_rlhf.plan`.
HOST_GIB = {UP_TO_8B: (160, 36), UP_TO_3B: (67, 20)}


class GpuType(NamedTuple):
    """A GPU type. Links in GB/s in one direction, 0 where there is none."""

    name: str  # as the plan prints it
    pattern: str  # of a device's name, as nvidia-smi prints it
    memory_gb: int  # the size in its name
    usable_gib: float  # the total of torch.cuda.mem_get_info
    tflops: float  # dense bf16 peak, TFLOP/s
    bandwidth: float  # of its memory, GB/s
    nvlink: float  # to the others of its node
    pcie: float  # to the host
    network: float  # to other nodes, per GPU of the maker's own machine


#: By the name that ``--hardware`` takes. The first whose pattern fits a device is its type. Figures
#: are from NVIDIA's data sheets of the GPUs and of the DGX A100, H100, H200 and B200; of the RTX
#: 3090, 4090 and 5090 from the papers on GA102, Ada and Blackwell.
GPUS = {
    "a100-40gb": GpuType("A100 40 GB",       r"A100.*40GB",  40,  39.4,  312, 1555, 300, 32,   25),
    "a100": GpuType("A100 80 GB",            r"A100",        80,  79.2,  312, 2039, 300, 32,   25),
    "a800": GpuType("A800 80 GB",            r"A800",        80,  79.2,  312, 2039, 200, 32,   25),
    "h100-pcie": GpuType("H100 PCIe 80 GB",  r"H100.*PCIe",  80,  79.1,  756, 2000,   0, 64, 12.5),
    "h100": GpuType("H100 80 GB",            r"H100",        80,  79.1,  989, 3350, 450, 64,   50),
    "h800": GpuType("H800 80 GB",            r"H800",        80,  79.1,  989, 3350, 200, 64,   50),
    "h200": GpuType("H200 141 GB",           r"H200",       141, 139.8,  989, 4800, 450, 64,   50),
    "b200": GpuType("B200 180 GB",           r"B200",       180, 178.3, 2250, 7700, 900, 64,   50),
    "l40s": GpuType("L40S 48 GB",            r"L40S",        48,  44.4,  362,  864,   0, 32, 12.5),
    "6000ada": GpuType("RTX 6000 Ada 48 GB", r"6000 Ada",    48,  47.5,  364,  960,   0, 32, 12.5),
    "a6000": GpuType("RTX A6000 48 GB",      r"RTX A6000",   48,  47.5,  155,  768,  56, 32, 12.5),
    "a40": GpuType("A40 48 GB",              r"A40\b",       48,  44.4,  150,  696,  56, 32, 12.5),
    "5090": GpuType("RTX 5090 32 GB",        r"RTX 5090",    32,  31.4,  210, 1792,   0, 64, 1.25),
    "4090": GpuType("RTX 4090 24 GB",        r"RTX 4090",    24,  23.6,  165, 1008,   0, 32, 1.25),
    "3090": GpuType("RTX 3090 24 GB",        r"RTX 3090",    24,  23.7,   71,  936,   0, 32, 1.25),
    "l4": GpuType("L4 24 GB",                r"L4\b",        24,  22.0,  121,  300,   0, 32, 6.25),
    "a10": GpuType("A10 24 GB",              r"A10G?\b",     24,  22.0,  125,  600,   0, 32, 6.25),
}  # fmt: skip

#: The type that a recipe's hardware is planned for where only a size is named: the commonest one.
BY_SIZE = {24: "4090", 40: "a100-40gb", 80: "h100"}


def gpu_of(device: str, memory_gib: float) -> tuple[str, GpuType]:
    """The key and type of a device, by its name; an unknown one's figures are of its size."""
    for key, gpu in GPUS.items():
        fits = abs(gpu.usable_gib - memory_gib) < 0.2 * gpu.usable_gib
        if re.search(gpu.pattern, device, re.IGNORECASE) and fits:
            return key, gpu
    smaller = [size for size in BY_SIZE if size <= memory_gib * 1.1]
    key = BY_SIZE[max(smaller, default=min(BY_SIZE))]
    return key, GPUS[key]


#: In the name of a device whose peaks are not those of its type: a slice or another chip.
OTHER_PEAKS = r"MIG|NVL|Laptop|Max-Q|[45]090 D|A10G"


def known_gpu(device: str) -> str | None:
    """The key of a device's type, by its name alone; None where its peaks are not known."""
    if re.search(OTHER_PEAKS, device, re.IGNORECASE):
        return None
    fits = (key for key, gpu in GPUS.items() if re.search(rf"\b(?:{gpu.pattern})", device))
    return next(fits, None)


@dataclass(frozen=True)
class Layout:
    """Equal nodes with GPUs, as a hardware name gives them."""

    nodes: int = 1
    gpus: int = 0  # of each node
    gpu: str = ""  # their type, a key of GPUS; "" without

    @property
    def size(self) -> int:
        """The size of :data:`SIZES` whose settings fit these GPUs, GB; 0 without GPUs."""
        if not self.gpus:
            return 0
        return max(size for size in SIZES if size <= GPUS[self.gpu].memory_gb)

    @property
    def used(self) -> int:
        """GPUs of a node that a run uses; 0 without GPUs."""
        return next((count for count in COUNTS if count <= self.gpus), 0)

    @property
    def settings_name(self) -> str:
        """The name of its settings: 3 H200s have those of ``2x80gb``."""
        if not self.gpus:
            return "cpu"
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.used}x{self.size}gb"


def parse(name: str) -> Layout:
    """The layout of a name: ``cpu`` or ``[NODESx]COUNTx{SIZEgb|TYPE}``.

    A size stands for its commonest type (:data:`BY_SIZE`).

    Raises:
        ValueError: one line that says how a name is written.
    """
    if name == "cpu":
        return Layout()
    known = name.lower()
    number = r"([1-9]\d{0,3})x"
    found = re.fullmatch(rf"(?:{number})?{number}(?:(\d+)gb|([a-z0-9-]+))", known, re.ASCII)
    gpu = (BY_SIZE.get(int(found[3])) if found[3] else found[4]) if found else None
    if found is None or gpu not in GPUS:
        sizes = ", ".join(f"{size}gb" for size in BY_SIZE)
        raise ValueError(
            f"{name}: no such hardware; expected cpu or [NODESx]COUNTx followed by a size "
            f"({sizes}) or a type ({', '.join(GPUS)}), such as 8x80gb"
        )
    return Layout(int(found[1] or 1), int(found[2]), gpu)


def size_of(memory_mib: float) -> int:
    """The size class of a GPU of so many MiB, GB; 0 if it is below the smallest."""
    return next((size for size, least in SIZES.items() if memory_mib >= least), 0)


def name_of(count: int, smallest_mib: float) -> str:
    """The name whose settings use most of a node's GPUs; "" if too small, "cpu" if none."""
    if not count:
        return "cpu"
    size = size_of(smallest_mib)
    return Layout(1, count, BY_SIZE[size]).settings_name if size else ""


def largest_models(layout: Layout, host_gib: float | None = None) -> str:
    """The largest models that fit, a key of :data:`MODELS`; of any host where it is None."""
    size, gpus = layout.size, layout.nodes * layout.used
    if not size:
        return TINY
    large = size == 80 or (size == 40 and gpus >= 4)
    models = UP_TO_8B if large else UP_TO_3B if size == 40 or gpus >= 4 else UP_TO_1B
    smaller = {UP_TO_8B: UP_TO_3B, UP_TO_3B: UP_TO_1B}
    while host_gib is not None and models in smaller:
        if int(host_gib) >= host_needed(models, layout):
            break
        models = smaller[models]
    return models


def host_needed(models: str, layout: Layout) -> int:
    """Host memory of a node in GiB that models of :data:`HOST_GIB` need."""
    base, each = HOST_GIB[models]
    return base + each * layout.used


def settings(layout: Layout) -> dict[str, dict[str, Any]]:
    """The recipe keys that depend on number and size of the GPUs, as a nested mapping.

    The others are in configs/hardware/gpus.yaml. These fit the largest models; for smaller ones the
    plan chooses faster settings (`sg_rlhf.plan.load.fitted`).

    On a single GPU ZeRO-3 saves nothing, and ZeRO-2
    takes a third of its time (lab/bench/results/zero_stages.json). GPUs of 24 and 40 GB train one
    sample at a time. Micro-batches of several GPUs leave room for logits, where a model has no
    fused head. Optimizer states (12 bytes per parameter) are in host memory unless 4 or more GPUs
    of 80 GB share them. vLLM's share of the memory holds 8B parameters (15 GiB) where such models
    fit; on a single GPU of 80 GB, policy and reference need more of the rest.
    """
    size, gpus = layout.size, layout.nodes * layout.used
    share = {24: 0.55, 40: 0.6 if gpus >= 4 else 0.5, 80: 0.6 if gpus > 1 else 0.5}[size]
    train = 1 if size < 80 else 8 if gpus == 1 else 4
    ranks = {"num_nodes": layout.nodes, "num_gpus_per_node": layout.used}
    return {
        "actor": dict(ranks),
        "ref": dict(ranks),
        "vllm": {"num_engines": gpus, "gpu_memory_utilization": share},
        "ds": {"zero_stage": 3 if gpus > 1 else 2, "adam_offload": size < 80 or gpus < 4},
        "rollout": {"micro_batch_size": 2 * train},
        "train": {"micro_batch_size": train},
    }


def packages(name: str) -> str:
    """``cpu`` or ``cuda``: the packages for a name, or, for "", for the GPUs that are here.

    Raises:
        ValueError: no such hardware.
    """
    if name == "cuda":  # any GPUs
        return "cuda"
    if name:
        return "cuda" if parse(name).gpus else "cpu"
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.startswith(b"GPU ") else "cpu"


if __name__ == "__main__":
    try:
        print(packages(os.environ.get("SG_HARDWARE", "")))
    except ValueError as error:
        print(f"error: SG_HARDWARE={error}", file=sys.stderr)
        sys.exit(2)
