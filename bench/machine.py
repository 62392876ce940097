"""The machine that a benchmark ran on, for its result."""

from __future__ import annotations

import sys
import time
from importlib import metadata
from typing import Any

from sg_rlhf.common.resources import machine, processor

__all__ = ["machine", "processor", "provenance"]


def provenance(script: str, *packages: str) -> dict[str, Any]:
    """What a result says of its origin: command, date, machine, versions of the packages."""
    return {
        "command": " ".join([f"python bench/{script}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {name: metadata.version(name) for name in packages},
    }
