"""Memory, cores, disk and GPUs that this process may use, and a refusal of a full disk.

A container or a job sees the whole machine in `/proc/meminfo`, but is killed when it takes more
than its cgroup allows. Cgroups of version 1 and 2 are read: ours and all above it.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sg_rlhf.common.text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path("/")

#: Control file with the limit of memory, by cgroup version.
_MEMORY = {2: "memory.max", 1: "memory.limit_in_bytes"}

#: The flag of every command that checks the disk first.
SKIP = "--skip-room-check"


# ------------------------------------------------------------------------------ memory and cores


def memory(root: Path = ROOT) -> int | None:
    """Bytes of the machine's memory; None where `/proc/meminfo` is missing."""
    return _meminfo(root, "MemTotal")


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroups allow; None without a limit below the machine's memory."""
    limits = (_number(folder / _MEMORY[version]) for version, folder in _groups(root, "memory"))
    lowest = min((limit for limit in limits if limit is not None), default=None)
    total = memory(root)
    return None if lowest is None or (total is not None and lowest >= total) else lowest


def usable_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may use at most."""
    limit = memory_limit(root) or memory(root)
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores(root: Path = ROOT, affinity: int | None = None) -> int:
    """Cores that this process may use: by affinity and the cgroups' quota, at least 1."""
    usable = float(affinity or len(os.sched_getaffinity(0)))
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us").strip()
            period = _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit():
            usable = min(usable, int(quota) / int(period or 100_000))
    return max(1, int(usable))


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of our cgroup of a controller and of its ancestors, the top first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not names:
            version, base = 2, root / "sys/fs/cgroup"
        elif controller in names.split(","):
            version, base = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the path is often the host's and does not exist: the top then is ours.
        inside = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(inside) + 1):
            yield version, base.joinpath(*inside[:depth])


def _meminfo(root: Path, name: str) -> int | None:
    line = re.search(rf"^{name}:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _number(file: Path) -> int | None:
    """The number in a control file; None where there is none, as in `max`."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# -------------------------------------------------------------------------- GPUs and the machine


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The GPUs of CUDA_VISIBLE_DEVICES; None where it is not set and every GPU is visible.

    As CUDA reads it: an empty name or -1 also hides everything after it.
    """
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return None
    names = (name.strip() for name in variable.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def processor() -> str:
    """The processor's model name."""
    for line in _text(ROOT / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """System, processor, cores and memory (GiB) of the whole machine, for result files."""
    total = memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(total / 2**30, 1),
    }


# ---------------------------------------------------------------------------------------- disk


class InsufficientSpace(ValueError):
    """The disk is too small for a command; the message is one line."""


def check_disk(flag: str, folder: Path, what: str, needed: int) -> None:
    """Raise InsufficientSpace if `what` needs more bytes than the disk of `folder` has free."""
    free = free_disk(folder)
    if needed > free:
        raise InsufficientSpace(
            f"{flag} {folder}: {what} takes {format_bytes(needed)} of disk, "
            f"{format_bytes(free)} are free ({SKIP} skips this check)"
        )


def free_disk(path: Path) -> int:
    """Bytes free where `path` is or will be."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """The path, if it is there, else the nearest of its parents."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
