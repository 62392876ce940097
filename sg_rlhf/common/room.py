"""How much disk is free, and sizes and times in words. Memory is `cgroup.free_memory`."""

from __future__ import annotations

import shutil
from pathlib import Path


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
