"""Facts about a machine, which doctor, plan and run share; or JSON that describes another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]


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
    free_gb: Amount  # 1e9 bytes
    read_only: dict[str, str] = {}  # our folders that this user cannot write to -> their paths


class Facts(BaseModel):
    """One machine. None means unknown, and the check is skipped.

    Descriptions by other versions may have more keys, which are ignored.
    """

    model_config = ConfigDict(frozen=True)

    #: Those that CUDA_VISIBLE_DEVICES leaves. With MIG, the smallest slice alone: CUDA gives a
    #: process one slice.
    gpus: list[Gpu] | None = None
    gpu_problem: str | None = None  # the driver's error message
    driver: Version | Literal["none"] | None = None  # such as "580.65.06"
    #: Newest CUDA version of the driver's library. It may be newer than the driver, with NVIDIA's
    #: package for forward compatibility.
    driver_cuda: Version | None = None
    nvlink: Links | None = None  # None also for a single GPU
    host_memory_gib: Amount | None = None
    cgroup_memory_gib: Amount | None = None  # limit of this container or job; None without one
    dev_shm_mib: Amount | None = None  # free
    disks: list[Disk] | None = None
    compiler: str | None = None  # C++, or "none"
    cores: Annotated[int, Field(ge=1)] | None = None  # by affinity and quota
    written_gb: Amount | None = None  # size of the run directory, of a resumed run
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


class FactsError(ValueError):
    """An invalid description of a machine; the message is one line."""


def read(file: Path) -> Facts:
    """Read the facts of a machine from a JSON file, or from all that ``--json`` printed.

    Raises:
        FactsError: one line with the file, the key, the value and what was expected.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if '"facts"' in text:
            return _Printed.model_validate_json(text).facts
        return Facts.model_validate_json(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FactsError(f"--facts {file}: cannot be read as JSON: {reason}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = f"{key}={str(first['input'])[:60]}: " if key else ""
        raise FactsError(f"--facts {file}: {value}{first['msg']}") from None


class _Printed(BaseModel):
    facts: Facts
