"""Machines for a plan: described by a hardware name, or this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sg_rlhf.common import resources
from sg_rlhf.machine import names
from sg_rlhf.machine.facts import Facts, Gpu
from sg_rlhf.machine.names import GPUS, GpuType, gpu_of

#: Host memory that a machine is taken to have per GPU, GiB: about the smallest that clouds sell
#: with GPUs of the size (an A100 80 GB comes with 170 GB, one of 40 GB with 85).
HOST_GIB_PER_GPU = {24: 64, 40: 80, 80: 160}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of equal machines, as a plan needs them."""

    nodes: int = 1
    gpus_per_node: int = 0
    gpu: str = ""  # their type, a key of GPUS
    gpu_memory_gib: float = 0.0  # what CUDA can give of one GPU
    host_memory_gib: float  # of one node, or its cgroup's limit
    disk_free_gb: float | None = None  # where the run is written, 1e9 bytes; None if not known
    link: str = ""  # what connects the GPUs of a node: nvlink or pcie

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
    return Hardware(host_memory_gib=resources.usable_memory() / 2**30)


def of_gpus(kind: str, *, nodes: int = 1, gpus_per_node: int = 1) -> Hardware:
    """Machines of so many GPUs of a type, with a usual amount of host memory."""
    gpu = GPUS[kind]
    size = names.Layout(nodes, gpus_per_node, kind).size
    return Hardware(
        nodes=nodes, gpus_per_node=gpus_per_node, gpu=kind, gpu_memory_gib=gpu.usable_gib,
        host_memory_gib=float(HOST_GIB_PER_GPU[size] * gpus_per_node),
        link="nvlink" if gpu.nvlink else "pcie",
    )  # fmt: skip


def of_machine(facts: Facts, nodes: int = 1, *, gpus: Sequence[Gpu] | None = None) -> Hardware:
    """Nodes of such a machine; of unequal GPUs the smallest counts.

    Args:
        gpus: the GPUs of a node that count; None for all.
    """
    found = facts.gpus if gpus is None else gpus
    if not found:
        return Hardware(
            nodes=nodes, host_memory_gib=facts.memory_gib, disk_free_gb=facts.run_disk_gb
        )
    smallest = min(found, key=lambda gpu: gpu.memory_mib)
    reported = smallest.memory_mib / 1024
    kind, gpu = gpu_of(smallest.name, reported)
    # CUDA gives a little less than the driver reports.
    usable = min(gpu.usable_gib, reported) if abs(gpu.usable_gib / reported - 1) < 0.1 else reported
    linked = len(found) == 1 or facts.nvlink == "all"
    return Hardware(
        nodes=nodes, gpus_per_node=len(found), gpu=kind, gpu_memory_gib=usable,
        host_memory_gib=facts.memory_gib, disk_free_gb=facts.run_disk_gb,
        link="nvlink" if linked and gpu.nvlink else "pcie",
    )  # fmt: skip
