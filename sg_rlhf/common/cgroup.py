"""Memory and cores that this process may use: the machine's, or what its cgroups leave.

A container or a job sees the whole machine in `/proc/meminfo`, and is ended where it takes more
than its cgroup allows. Version 2 and version 1 are read, of our cgroup and of all above it.
`examples/scripts/common.sh` reads the limits for itself: it runs before any Python is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")

#: Control files of memory by version: limit, use, statistics, and the statistic of cached files.
_MEMORY = {
    2: ("memory.max", "memory.current", "memory.stat", "file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_cache"),
}


def memory(root: Path = ROOT) -> int | None:
    """Bytes of the machine's memory; None where nothing says."""
    return _meminfo(root, "MemTotal")


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroups allow; None without a limit below the machine's memory."""
    limits = (_number(folder / _MEMORY[version][0]) for version, folder in _groups(root, "memory"))
    least = min((limit for limit in limits if limit is not None), default=None)
    here = memory(root)
    return None if least is None or (here is not None and least >= here) else least


def usable_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may use at most."""
    found = memory_limit(root) or memory(root)
    return found or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may still take."""
    found = _meminfo(root, "MemAvailable")
    if found is None:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for version, folder in _groups(root, "memory"):
        limit, used, statistics, cached = _MEMORY[version]
        most, taken = _number(folder / limit), _number(folder / used)
        if most is not None and taken is not None:
            # What is cached of files counts as used, and is given up when memory runs short.
            cache = re.search(rf"^{cached} (\d+)$", _text(folder / statistics), re.MULTILINE)
            found = min(found, max(0, most - taken + (int(cache[1]) if cache else 0)))
    return found


def cores(root: Path = ROOT, affinity: int | None = None) -> int:
    """Cores that this process may use: by affinity and the cgroups' quota, at least 1."""
    found = float(affinity or len(os.sched_getaffinity(0)))
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us").strip()
            period = _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit():
            found = min(found, int(quota) / int(period or 100_000))
    return max(1, int(found))


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of our cgroup of a controller, and of those above it, the top first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not names:
            version, base = 2, root / "sys/fs/cgroup"
        elif controller in names.split(","):
            version, base = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the path is often the host's, and not there: the top then is ours.
        inside = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(inside) + 1):
            yield version, base.joinpath(*inside[:depth])


def _meminfo(root: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _number(file: Path) -> int | None:
    """A control file's number; None without one, as `max`."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
