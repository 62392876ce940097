"""What GPUs of each type can do: the makers' figures, and the memory that CUDA reports of them.

Peaks are dense bf16 with float32 accumulation (data sheets often print twice that, with sparsity).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU type.

    Attributes:
        name: as the plan prints it.
        pattern: what of a device's name, as ``nvidia-smi`` prints it, says that it is one.
        memory_gb: the size in its name.
        usable_gib: what ``torch.cuda.mem_get_info`` gives as total, in GiB.
        tflops: dense bf16 peak, TFLOP/s.
        bandwidth: of its memory, GB/s.
        nvlink: to the others of its node, GB/s in one direction; 0 where it has none.
        pcie: to the host, GB/s in one direction.
        network: to other nodes, GB/s in one direction and per GPU, of the maker's own machine.
        source: where the figures are from.
    """

    name: str
    pattern: str
    memory_gb: int
    usable_gib: float
    tflops: float
    bandwidth: float
    nvlink: float
    pcie: float
    network: float
    source: str


#: By the name that ``--hardware`` takes. The first whose pattern fits a device is its type.
GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(
        name="A100 40 GB", pattern=r"A100.*40GB", memory_gb=40, usable_gib=39.4, tflops=312,
        bandwidth=1555, nvlink=300, pcie=32, network=25, source="NVIDIA A100 data sheet; DGX A100",
    ),
    "a100": Gpu(
        name="A100 80 GB", pattern=r"A100", memory_gb=80, usable_gib=79.2, tflops=312,
        bandwidth=2039, nvlink=300, pcie=32, network=25, source="NVIDIA A100 data sheet; DGX A100",
    ),
    "a800": Gpu(
        name="A800 80 GB", pattern=r"A800", memory_gb=80, usable_gib=79.2, tflops=312,
        bandwidth=2039, nvlink=200, pcie=32, network=25, source="NVIDIA A800 data sheet",
    ),
    "h100-pcie": Gpu(
        name="H100 PCIe 80 GB", pattern=r"H100.*PCIe", memory_gb=80, usable_gib=79.1, tflops=756,
        bandwidth=2000, nvlink=0, pcie=64, network=12.5, source="NVIDIA H100 data sheet",
    ),
    "h100": Gpu(
        name="H100 80 GB", pattern=r"H100", memory_gb=80, usable_gib=79.1, tflops=989,
        bandwidth=3350, nvlink=450, pcie=64, network=50, source="NVIDIA H100 data sheet; DGX H100",
    ),
    "h800": Gpu(
        name="H800 80 GB", pattern=r"H800", memory_gb=80, usable_gib=79.1, tflops=989,
        bandwidth=3350, nvlink=200, pcie=64, network=50, source="NVIDIA H800 data sheet",
    ),
    "h200": Gpu(
        name="H200 141 GB", pattern=r"H200", memory_gb=141, usable_gib=139.8, tflops=989,
        bandwidth=4800, nvlink=450, pcie=64, network=50, source="NVIDIA H200 data sheet; DGX H200",
    ),
    "b200": Gpu(
        name="B200 180 GB", pattern=r"B200", memory_gb=180, usable_gib=178.3, tflops=2250,
        bandwidth=7700, nvlink=900, pcie=64, network=50, source="NVIDIA DGX B200 data sheet",
    ),
    "l40s": Gpu(
        name="L40S 48 GB", pattern=r"L40S", memory_gb=48, usable_gib=44.4, tflops=362,
        bandwidth=864, nvlink=0, pcie=32, network=12.5, source="NVIDIA L40S data sheet",
    ),
    "6000ada": Gpu(
        name="RTX 6000 Ada 48 GB", pattern=r"RTX 6000 Ada", memory_gb=48, usable_gib=47.5,
        tflops=364, bandwidth=960, nvlink=0, pcie=32, network=12.5,
        source="NVIDIA RTX 6000 Ada data sheet",
    ),
    "a6000": Gpu(
        name="RTX A6000 48 GB", pattern=r"RTX A6000", memory_gb=48, usable_gib=47.5, tflops=155,
        bandwidth=768, nvlink=56, pcie=32, network=12.5, source="NVIDIA RTX A6000 data sheet",
    ),
    "a40": Gpu(
        name="A40 48 GB", pattern=r"A40\b", memory_gb=48, usable_gib=44.4, tflops=150,
        bandwidth=696, nvlink=56, pcie=32, network=12.5, source="NVIDIA A40 data sheet",
    ),
    "5090": Gpu(
        name="RTX 5090 32 GB", pattern=r"RTX 5090", memory_gb=32, usable_gib=31.4, tflops=210,
        bandwidth=1792, nvlink=0, pcie=64, network=1.25,
        source="NVIDIA RTX Blackwell architecture paper",
    ),
    "4090": Gpu(
        name="RTX 4090 24 GB", pattern=r"RTX 4090", memory_gb=24, usable_gib=23.6, tflops=165,
        bandwidth=1008, nvlink=0, pcie=32, network=1.25, source="NVIDIA Ada architecture paper",
    ),
    "3090": Gpu(
        name="RTX 3090 24 GB", pattern=r"RTX 3090", memory_gb=24, usable_gib=23.7, tflops=71,
        bandwidth=936, nvlink=0, pcie=32, network=1.25, source="NVIDIA GA102 architecture paper",
    ),
    "l4": Gpu(
        name="L4 24 GB", pattern=r"L4\b", memory_gb=24, usable_gib=22.0, tflops=121,
        bandwidth=300, nvlink=0, pcie=32, network=6.25, source="NVIDIA L4 data sheet",
    ),
    "a10": Gpu(
        name="A10 24 GB", pattern=r"A10G?\b", memory_gb=24, usable_gib=22.0, tflops=125,
        bandwidth=600, nvlink=0, pcie=32, network=6.25, source="NVIDIA A10 data sheet",
    ),
}  # fmt: skip

#: The type that a recipe's hardware is planned for where only a size is named: the commonest one.
BY_SIZE = {24: "4090", 40: "a100-40gb", 80: "h100"}


def gpu_of(device: str, memory_gib: float) -> tuple[str, Gpu]:
    """The key and type of a device, by its name; an unknown one's figures are of its size.

    Args:
        device: its name as ``nvidia-smi`` prints it.
        memory_gib: its memory.
    """
    for key, gpu in GPUS.items():
        fits = abs(gpu.usable_gib - memory_gib) < 0.2 * gpu.usable_gib
        if re.search(gpu.pattern, device, re.IGNORECASE) and fits:
            return key, gpu
    smaller = [size for size in BY_SIZE if size <= memory_gib * 1.1]
    key = BY_SIZE[max(smaller, default=min(BY_SIZE))]
    return key, GPUS[key]
