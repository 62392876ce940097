"""Gather the facts of this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path

from sg_rlhf.common import resources
from sg_rlhf.common.home import writable
from sg_rlhf.machine.facts import Disk, Facts
from sg_rlhf.machine.gpus import detect


def gather(run_dir: Path = Path("runs")) -> Facts:
    """The facts of this machine, for a run that writes to ``run_dir``."""
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    rest = {
        "host_memory_gib": _gib(resources.memory() or resources.usable_memory()),
        "cgroup_memory_gib": _gib(limit) if (limit := resources.memory_limit()) else None,
        "dev_shm_mib": _free_mib(Path("/dev/shm")),
        "disks": disks({"run": run_dir, "models": hub_cache()}),
        "compiler": shutil.which(compiler) or "none",
        "cores": resources.cores(),
        # Not of another folder, which may have any number of files.
        "written_gb": size_gb(run_dir) if (run_dir / "config.yaml").is_file() else 0.0,
        "ray_address": os.environ.get("RAY_ADDRESS"),
    }
    return detect().model_copy(update=rest)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


def _free_mib(folder: Path) -> float:
    return round(shutil.disk_usage(folder).free / 2**20) if folder.is_dir() else 0.0


def hub_cache() -> Path:
    """The download cache of huggingface_hub."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError:
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(HF_HUB_CACHE)


def disks(places: dict[str, Path]) -> list[Disk]:
    """The file systems of these folders, or of their nearest existing parents; each once."""
    found: dict[int, Disk] = {}
    for name, place in places.items():
        there = resources.nearest_existing(place.absolute())
        usage = shutil.disk_usage(there)
        if not usage.total:  # no disk, as /proc; the run says that it cannot write there
            continue
        free = round(usage.free / 1e9, 1)
        disk = found.setdefault(there.stat().st_dev, Disk(holds=[], path=str(there), free_gb=free))
        disk.holds.append(name)
        if there.is_dir() and not writable(there):
            disk.read_only[name] = str(there)
    return list(found.values())


def size_gb(folder: Path) -> float:
    """Size of a folder's files, GB; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may delete checkpoints
                total += os.lstat(os.path.join(base, name)).st_size
    return round(total / 1e9, 1)
