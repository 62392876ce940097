"""A small file system of its own, to be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Mount one on an empty folder; skips the test where this machine does not let us."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system (root)")
    try:
        yield folder
    finally:
        # Lazily: a process that was just ended may hold a file still.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free(disk: Path) -> int:
    """Bytes that are left."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, leave: int = 0) -> None:
    """Take all of a disk but some bytes."""
    (disk / BALLAST).unlink(missing_ok=True)
    with (disk / BALLAST).open("wb") as file, contextlib.suppress(OSError):
        left = free(disk) - leave
        os.posix_fallocate(file.fileno(), 0, max(left, 1))


def make_room(disk: Path) -> None:
    """Give it back."""
    (disk / BALLAST).unlink()
