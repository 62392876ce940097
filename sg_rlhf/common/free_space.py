"""Is there room: what a command takes of disk and memory, refused where it is not free.

And sizes and times in words.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.common import cgroup

#: The flag of every command that checks.
SKIP = "--skip-room-check"
#: Fewer passages or questions than this take minutes at most, and no words.
MANY = 20_000


class InsufficientSpace(ValueError):
    """What a command takes is not free; one line."""


@dataclass(frozen=True)
class Requirements:
    """What a command takes at most, in bytes; and that in lines for people."""

    disk: int
    memory: int
    lines: tuple[str, ...] = ()
    #: What would take less, for a refusal.
    instead: str = ""


def shortage(folder: Path, needs: Requirements) -> tuple[str, int, int] | None:
    """What is not there: "disk" or "memory", needed, free. None if both are."""
    if needs.disk > (free := free_disk(folder)):
        return "disk", needs.disk, free
    if needs.memory > (free := cgroup.free_memory()):
        return "memory", needs.memory, free
    return None


def check(flag: str, folder: Path, what: str, needs: Requirements) -> None:
    """Refuse what the disk of `folder`, or the memory that our cgroups leave, cannot hold.

    Args:
        flag: that names the folder.
        what: takes it, as "the build".

    Raises:
        NoRoom: naming what is needed, what is free, the folder and what goes ahead anyway.
    """
    if (lack := shortage(folder, needs)) is not None:
        name, needed, free = lack
        raise InsufficientSpace(
            f"{flag} {folder}: {what} takes {size(needed)} of {name}, {size(free)} are "
            f"free{needs.instead} ({SKIP} goes ahead anyway)"
        )


def print_requirements(lines: Iterable[str], folder: Path) -> None:
    """Print what is needed, and what is free."""
    for line in lines:
        print(line)
    disk, memory = free_disk(folder), cgroup.free_memory()
    print(f"  free    {size(disk)} of disk, {size(memory)} of memory", flush=True)


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
