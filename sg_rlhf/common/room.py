"""How much memory and disk is free, and sizes in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

#: Limit, use and statistics of a cgroup, version 2 and 1; what is cached of files is in the use.
_CGROUP = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_cache",
    ),
)


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: of the machine, or what its cgroup leaves."""
    found = int(psutil.virtual_memory().available)
    for limit, used, statistics, cached in _CGROUP:
        text = (root / limit).read_text().strip() if (root / limit).is_file() else ""
        if not text.isdigit():
            continue
        lines = (root / statistics).read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
        own = int((root / used).read_text()) - cache
        found = min(found, max(0, int(text) - own))
    return found


def free_disk(path: Path) -> int:
    """Bytes free where `path` is, or will be."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def size(number: float) -> str:
    """Bytes in words, with 1,000 as the step: 64.6 GB."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.0f} {units[0]}" if number >= 100 else f"{number:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """A time in words: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
