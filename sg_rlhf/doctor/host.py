"""What the machine itself has: memory, cores, disks, Python, a compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.doctor.facts import NONE, Disk, Python
from sg_rlhf.doctor.questions import Question

if TYPE_CHECKING:
    from collections.abc import Mapping

_ABOUT_PYTHON = """\
import importlib.util, json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print(json.dumps([sys.version.split()[0], sys.executable, os.path.isfile(header), venv]))
"""


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def memory_gib(root: Path = Path("/")) -> float | None:
    """The machine's memory, GiB."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return round(int(found[1]) / 2**20, 1) if found else None


def _cgroup_values(root: Path, controller: str, new: str, old: str) -> list[str]:
    """A control file's texts, of our cgroup and of all above it, in version 2 or 1."""
    texts = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, names, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not names:
            base, file = root / "sys/fs/cgroup", new
        elif controller in names.split(","):
            base, file = root / "sys/fs/cgroup" / controller, old
        else:
            continue
        # In a container the path is often the host's, and not there: the top then is ours.
        inside = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(inside) + 1):
            texts.append(_read(base.joinpath(*inside[:depth]) / file))
    return [text.strip() for text in texts if text.strip()]


def cgroup_memory_gib(root: Path = Path("/")) -> float | None:
    """The limit of this container or job, GiB; None without one, or with one above the memory."""
    texts = _cgroup_values(root, "memory", "memory.max", "memory.limit_in_bytes")
    limits = [int(text) / 2**30 for text in texts if text.isdigit()]
    host = memory_gib(root)
    least = min(limits, default=None)
    return None if least is None or (host is not None and least >= host) else round(least, 1)


def cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Cores that this process may use: by affinity and the cgroup's quota, at least 1."""
    found = float(affinity or len(os.sched_getaffinity(0)))
    for text in _cgroup_values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            found = min(found, int(quota) / int(period or 100_000))
    return max(1, int(found))


def dev_shm_mib(path: str = "/dev/shm") -> float | None:
    """Room in shared memory, MiB; 0 where there is none."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return 0.0
    except OSError:
        return None
    return round(found.f_bavail * found.f_frsize / 2**20)


def disks(places: Mapping[str, Path]) -> list[Disk]:
    """The file systems of these places, or of the nearest parents that exist; each once.

    One without a size, as /proc, is none.
    """
    found: dict[int, list[tuple[str, Path]]] = {}
    for name, place in places.items():
        there = Path(os.path.realpath(place))
        while not there.exists() and there != there.parent:
            there = there.parent
        with contextlib.suppress(OSError):
            found.setdefault(there.stat().st_dev, []).append((name, there))
    return [
        Disk(
            holds=[name for name, _ in ours],
            path=str(ours[0][1]),
            free_gb=round(shutil.disk_usage(str(ours[0][1])).free / 1e9, 1),
        )
        for ours in found.values()
        if shutil.disk_usage(str(ours[0][1])).total
    ]


def size_gb(folder: Path) -> float:
    """What a folder's files take, GB; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return round(total / 1e9, 1)


def open_files() -> int | None:
    """The hard limit of open files, to which Ray raises the soft one; None without."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


class Python311:
    """The Python 3.11 that an installation would use; this one if it is one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._questions = []
        if sys.version_info[:2] != (3, 11) or environment.get("SG_PYTHON"):
            names = [environment["SG_PYTHON"]] if environment.get("SG_PYTHON") else ["python3.11"]
            self._questions = [Question([n, "-I", "-c", _ABOUT_PYTHON], environment) for n in names]

    def facts(self, deadline: float) -> Python:
        """Of that interpreter; of this one where there is none."""
        for question in self._questions:
            status, text = question.answer(deadline)
            if status == 0:
                version, path, headers, venv = json.loads(text.splitlines()[-1])
                return Python(version, path, headers, venv)
        header = Path(sysconfig.get_path("include")) / "Python.h"
        return Python(
            version=sys.version.split()[0],
            path=sys.executable,
            headers=header.is_file(),
            venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        )


class Compiler:
    """The C++ compiler that DeepSpeed's operators are built with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        words = shlex.split(environment.get("CXX", "")) or ["g++"]
        program = shutil.which(words[0], path=environment.get("PATH", ""))
        self._name = " ".join(words)
        argv = [*words, "-dumpfullversion", "-dumpversion"]
        self._question = Question(argv, environment) if program else None

    def found(self, deadline: float) -> str:
        """Its name and version, or "none"."""
        if self._question is None:
            return NONE
        status, text = self._question.answer(deadline)
        return f"{self._name} {text.strip()}" if status == 0 else self._name


def container(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """What kind of container this is, or "none"."""
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for name in ("SINGULARITY_NAME", "APPTAINER_NAME"):
        if environment.get(name):
            return "apptainer"
    for file, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / file).exists():
            return kind
    return environment.get("container") or NONE
