"""The machine that a benchmark ran on, for its result."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def memory_gb() -> float:
    """Memory in GB (2**30 bytes)."""
    return round(psutil.virtual_memory().total / 2**30, 1)
