"""Machines for a plan: described by a hardware name, or this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sg_rlhf.common import resources
from sg_rlhf.machine import names
from sg_rlhf.machine.gpus import Gpu, detect
from sg_rlhf.machine.names import GPUS, GpuType, gpu_of

#: Host memory that a machine is taken to have per GPU, GiB: about the smallest that clouds sell
#: with GPUs of the size (an A100 80 GB comes with 170 GB, one of 40 GB with 85).
HOST_GIB_PER_GPU = {24: 64, 40: 80, 80: 160}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of equal machines.

    Attributes:
        nodes: machines.
        gpus_per_node: GPUs of each; 0 for a machine without.
        gpu: their type, a key of :data:`sg_rlhf.machine.names.GPUS`; "" without.
        gpu_memory_gib: what CUDA can give of one GPU, GiB.
        host_memory_gib: memory of one node (its cgroup's limit where that is less), GiB.
        disk_free_gb: free space where the run is written, GB (1e9); None where it is not known.
        link: what connects the GPUs of a node, ``nvlink`` or ``pcie``; "" without GPUs.
    """

    nodes: int
    gpus_per_node: int
    gpu: str
    gpu_memory_gib: float
    host_memory_gib: float
    disk_free_gb: float | None
    link: str

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def type(self) -> GpuType:
        """Figures of the GPUs.

        Raises:
            KeyError: there are none.
        """
        return GPUS[self.gpu]

    @property
    def link_gb_per_s(self) -> float:
        """Between two GPUs of a node, GB/s in one direction."""
        return self.type.nvlink if self.link == "nvlink" else self.type.pcie

    def describe(self) -> str:
        """In a few words."""
        host = f"{self.host_memory_gib:,.0f} GiB of host memory"
        if not self.gpus:
            return f"no GPU, {host}"
        of_node = f"{self.gpus_per_node} x {self.type.name} ({self.link}), {host}"
        return of_node if self.nodes == 1 else f"{self.nodes} nodes of {of_node} each"


def named(name: str) -> Hardware:
    """The hardware of a name (:func:`sg_rlhf.machine.names.parse`).

    Host memory is a usual amount; the disk is not known.

    Raises:
        ValueError: one line that says how a name is written.
    """
    layout = names.parse(name)
    if layout.gpus:
        return of_gpus(layout.gpu, nodes=layout.nodes, gpus_per_node=layout.gpus)
    return Hardware(
        nodes=1, gpus_per_node=0, gpu="", gpu_memory_gib=0.0,
        host_memory_gib=resources.usable_memory() / 2**30, disk_free_gb=None, link="",
    )  # fmt: skip


def of_gpus(kind: str, *, nodes: int = 1, gpus_per_node: int = 1) -> Hardware:
    """Machines of so many GPUs of a type, with a usual amount of host memory."""
    gpu = GPUS[kind]
    size = names.Layout(nodes, gpus_per_node, kind).size
    return Hardware(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=kind,
        gpu_memory_gib=gpu.usable_gib,
        host_memory_gib=float(HOST_GIB_PER_GPU[size] * gpus_per_node),
        disk_free_gb=None,
        link="nvlink" if gpu.nvlink else "pcie",
    )


def of_machine(
    gpus: Sequence[Gpu],
    *,
    nvlink: bool,
    host_memory_gib: float,
    disk_free_gb: float | None = None,
    nodes: int = 1,
) -> Hardware:
    """What was found on a machine; of unequal GPUs the smallest counts.

    Args:
        gpus: of one node.
        nvlink: whether the GPUs are linked by it.
        host_memory_gib: of the machine, or its cgroup's limit.
        disk_free_gb: where the run is written.
        nodes: machines of this kind.
    """
    if not gpus:
        return replace(
            named("cpu"), host_memory_gib=host_memory_gib, disk_free_gb=disk_free_gb, nodes=nodes
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory_mib)
    reported = smallest.memory_mib / 1024
    kind, gpu = gpu_of(smallest.name, reported)
    # CUDA gives a little less than the driver reports.
    usable = min(gpu.usable_gib, reported) if abs(gpu.usable_gib / reported - 1) < 0.1 else reported
    return Hardware(
        nodes=nodes,
        gpus_per_node=len(gpus),
        gpu=kind,
        gpu_memory_gib=usable,
        host_memory_gib=host_memory_gib,
        disk_free_gb=disk_free_gb,
        link="nvlink" if nvlink and gpu.nvlink else "pcie",
    )


def detected(folder: str | Path = ".") -> Hardware:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES leaves.

    Its disk is that of ``folder`` or of the nearest parent that exists.
    """
    found = detect()
    return of_machine(
        found.gpus,
        nvlink=len(found.gpus) == 1 or found.nvlink == "all",
        host_memory_gib=resources.usable_memory() / 2**30,
        disk_free_gb=resources.free_disk(Path(folder)) / 1e9,
    )
