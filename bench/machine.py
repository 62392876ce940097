"""The machine that a benchmark ran on, for its result."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

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


def provenance(script: str, *packages: str) -> dict[str, Any]:
    """What a result says of its origin: command, date, machine, versions of the packages."""
    return {
        "command": " ".join([f"python bench/{script}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gb": memory_gb(),
        },
        "versions": {name: metadata.version(name) for name in packages},
    }
