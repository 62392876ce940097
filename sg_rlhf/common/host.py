"""The GPUs that are visible, and what a result says of the machine that it was measured on."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any


def visible_gpus() -> list[str] | None:
    """The GPUs of CUDA_VISIBLE_DEVICES; None where it is not set, and every GPU is visible.

    As CUDA reads it: what follows an empty name or -1 is hidden, too.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names = (name.strip() for name in given.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def memory_gb() -> float:
    """Memory in GB (2**30 bytes)."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def machine() -> dict[str, Any]:
    """System, processor, cores and memory."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": memory_gb(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> its version here, of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
