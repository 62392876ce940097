"""Facts about a machine, which doctor, plan and run share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

#: Which pairs of GPUs have NVLink.
Links = Literal["all", "some", "none"]


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice; sizes in MiB."""

    name: str  # as the driver gives it
    memory_mib: float
    compute_capability: str | None = None  # such as "9.0"
    used_mib: float | None = None


class Disk(BaseModel):
    """A file system."""

    holds: list[str]  # our folders on it: run (the run directory), models (the hub's cache)
    path: str  # one of these folders
    free_gb: float  # 1e9 bytes
    read_only: dict[str, str] = {}  # our folders that this user cannot write to -> their paths


class Facts(BaseModel):
    """One machine."""

    model_config = ConfigDict(frozen=True)

    #: Those that CUDA_VISIBLE_DEVICES leaves. With MIG, the smallest slice alone: CUDA gives a
    #: process one slice.
    gpus: list[Gpu] = []
    gpu_problem: str | None = None  # the driver's error message
    driver: str = "none"  # such as "580.65.06"
    #: Newest CUDA version of the driver's library. It may be newer than the driver, with NVIDIA's
    #: package for forward compatibility.
    driver_cuda: str | None = None
    nvlink: Links | None = None  # None for a single GPU
    host_memory_gib: float = 0.0
    cgroup_memory_gib: float | None = None  # limit of this container or job; None without one
    dev_shm_mib: float = 0.0  # free
    disks: list[Disk] = []
    compiler: str = "none"  # C++
    cores: int = 1  # by affinity and quota
    written_gb: float = 0.0  # size of the run directory, of a resumed run
    ray_address: str | None = None  # of the cluster that a run would join

    @property
    def memory_gib(self) -> float:
        """Host memory that a run can use, GiB."""
        return min(self.host_memory_gib, self.cgroup_memory_gib or math.inf)

    @property
    def run_disk_gb(self) -> float | None:
        """Free space where the run is written, GB; None where that is no disk."""
        return next((d.free_gb for d in self.disks if "run" in d.holds), None)
