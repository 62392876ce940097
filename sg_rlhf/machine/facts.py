"""Facts about a machine, which doctor, plan and run share."""

from __future__ import annotations

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
    """One machine. None means unknown, and the check is skipped."""

    model_config = ConfigDict(frozen=True)

    #: Those that CUDA_VISIBLE_DEVICES leaves. With MIG, the smallest slice alone: CUDA gives a
    #: process one slice.
    gpus: list[Gpu] | None = None
    gpu_problem: str | None = None  # the driver's error message
    driver: str | None = None  # such as "580.65.06", or "none"
    #: Newest CUDA version of the driver's library. It may be newer than the driver, with NVIDIA's
    #: package for forward compatibility.
    driver_cuda: str | None = None
    nvlink: Links | None = None  # None also for a single GPU
    host_memory_gib: float | None = None
    cgroup_memory_gib: float | None = None  # limit of this container or job; None without one
    dev_shm_mib: float | None = None  # free
    disks: list[Disk] | None = None
    compiler: str | None = None  # C++, or "none"
    cores: int | None = None  # by affinity and quota
    written_gb: float | None = None  # size of the run directory, of a resumed run
    ray_address: str | None = None  # of the cluster that a run would join

    @property
    def memory_gib(self) -> float | None:
        """Host memory that a run can use, GiB."""
        known = [m for m in (self.host_memory_gib, self.cgroup_memory_gib) if m is not None]
        return min(known, default=None)

    @property
    def run_disk_gb(self) -> float | None:
        """Free space where the run is written, GB."""
        return next((d.free_gb for d in self.disks or () if "run" in d.holds), None)
