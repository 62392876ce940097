"""Facts about a machine: gathered on it, or read from JSON that describes another one."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sg_rlhf.common import resources
from sg_rlhf.common.home import writable
from sg_rlhf.machine.gpus import Gpu, Links, detect

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]


class Disk(BaseModel):
    """A file system.

    Attributes:
        holds: which of our folders are on it: `run` (the run directory), `models` (the hub's
            cache).
        path: one of these folders.
        free_gb: free space, GB (1e9 bytes).
        read_only: which of our folders this user cannot write to, with their paths.
    """

    holds: list[str]
    path: str
    free_gb: Amount
    read_only: dict[str, str] = {}


class Facts(BaseModel):
    """One machine. None means unknown, and the check is skipped.

    Descriptions by other versions may have more keys, which are ignored.

    Attributes:
        gpus: visible GPUs (CUDA_VISIBLE_DEVICES).
        gpu_problem: the driver's error message.
        driver: NVIDIA's, such as "580.65.06"; "none" without one.
        driver_cuda: newest CUDA version of the driver's library.
        nvlink: whether all pairs of GPUs have it, some, or none.
        host_memory_gib: the machine's memory, GiB.
        cgroup_memory_gib: the limit of this container or job, GiB; None without one.
        dev_shm_mib: free shared memory, MiB.
        compiler: the C++ compiler, or "none".
        cores: that this process may use, by affinity and quota.
        written_gb: size of the run directory (of a resumed run), GB.
        ray_address: the cluster that a run would join.
    """

    model_config = ConfigDict(frozen=True)

    gpus: list[Gpu] | None = None
    gpu_problem: str | None = None
    driver: Version | Literal["none"] | None = None
    driver_cuda: Version | None = None
    nvlink: Links | None = None
    host_memory_gib: Amount | None = None
    cgroup_memory_gib: Amount | None = None
    dev_shm_mib: Amount | None = None
    disks: list[Disk] | None = None
    compiler: str | None = None
    cores: Annotated[int, Field(ge=1)] | None = None
    written_gb: Amount | None = None
    ray_address: str | None = None

    @property
    def memory_gib(self) -> float | None:
        """Host memory that a run can use, GiB."""
        known = [m for m in (self.host_memory_gib, self.cgroup_memory_gib) if m is not None]
        return min(known, default=None)


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


def gather(run_dir: Path = Path("runs")) -> Facts:
    """The facts of this machine.

    Args:
        run_dir: where a run would write.
    """
    found = detect()
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    return Facts(
        gpus=list(found.gpus),
        gpu_problem=found.problem,
        driver=found.driver,
        driver_cuda=found.driver_cuda,
        nvlink=found.nvlink,
        host_memory_gib=_gib(resources.memory()),
        cgroup_memory_gib=_gib(resources.memory_limit()),
        dev_shm_mib=_free_mib(Path("/dev/shm")),
        disks=disks({"run": run_dir, "models": hub_cache()}),
        compiler=shutil.which(compiler) or "none",
        cores=resources.cores(),
        written_gb=size_gb(run_dir),
        ray_address=os.environ.get("RAY_ADDRESS"),
    )


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 1)


def _free_mib(folder: Path) -> float:
    return round(shutil.disk_usage(folder).free / 2**20) if folder.is_dir() else 0.0


def hub_cache() -> Path:
    """The download cache of huggingface_hub."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError:
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(HF_HUB_CACHE)


def disks(places: dict[str, Path]) -> list[Disk]:
    """The file systems of these folders, or of their nearest existing parents; each once."""
    found: dict[int, Disk] = {}
    for name, place in places.items():
        there = place.absolute()
        while not there.exists():
            there = there.parent
        usage = shutil.disk_usage(there)
        if not usage.total:  # no disk, as /proc; the run says that it cannot write there
            continue
        free = round(usage.free / 1e9, 1)
        disk = found.setdefault(there.stat().st_dev, Disk(holds=[], path=str(there), free_gb=free))
        disk.holds.append(name)
        if there.is_dir() and not writable(there):
            disk.read_only[name] = str(there)
    return list(found.values())


def size_gb(folder: Path) -> float:
    """Size of a folder's files, GB; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may delete checkpoints
                total += os.lstat(os.path.join(base, name)).st_size
    return round(total / 1e9, 1)
