"""Facts about the host: memory, disks, Python, compiler, container."""

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

from sg_rlhf.common import resources
from sg_rlhf.doctor.facts import NONE, Disk, Python
from sg_rlhf.machine.probes import Question

if TYPE_CHECKING:
    from collections.abc import Mapping

_ABOUT_PYTHON = """\
import importlib.util, json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print(json.dumps([sys.version.split()[0], sys.executable, os.path.isfile(header), venv]))
"""


def memory_gib(root: Path = resources.ROOT) -> float | None:
    """The machine's memory, GiB."""
    return _gib(resources.memory(root))


def cgroup_memory_gib(root: Path = resources.ROOT) -> float | None:
    """Memory limit of this container or job, GiB; None without a limit below the memory."""
    return _gib(resources.memory_limit(root))


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 1)


def dev_shm_mib(path: str = "/dev/shm") -> float | None:
    """Free shared memory, MiB; 0 if there is none."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return 0.0
    except OSError:
        return None
    return round(found.f_bavail * found.f_frsize / 2**20)


def disks(places: Mapping[str, Path]) -> list[Disk]:
    """The file systems of these folders, or of their nearest existing parents; each once.

    File systems without a size, such as /proc, are skipped.
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
    """Size of a folder's files, GB; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return round(total / 1e9, 1)


def open_files() -> int | None:
    """Hard limit of open files, to which Ray raises the soft one; None if unlimited."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


class Python311:
    """Probe of the Python 3.11 that an installation would use; the running one if it is 3.11."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._questions = []
        if sys.version_info[:2] != (3, 11) or environment.get("SG_PYTHON"):
            names = [environment["SG_PYTHON"]] if environment.get("SG_PYTHON") else ["python3.11"]
            self._questions = [Question([n, "-I", "-c", _ABOUT_PYTHON], environment) for n in names]

    def facts(self, deadline: float) -> Python:
        """Facts of that interpreter; of the running one if there is no 3.11."""
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
    """Probe of the C++ compiler that torch.compile and Triton would use."""

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


class Nvcc:
    """Probe of the ``nvcc`` that torch would compile with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
        on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
        places = [f"{home}/bin/nvcc"] if home else [on_path, "/usr/local/cuda/bin/nvcc"]
        program = next((p for p in places if p and Path(p).exists()), None)
        self._question = Question([program, "--version"], environment) if program else None

    def release(self, deadline: float) -> str | None:
        """CUDA release such as "13.0"; "none" without nvcc, None if it does not answer."""
        if self._question is None:
            return NONE
        _, text = self._question.answer(deadline)
        found = re.search(r"release (\d+\.\d+)", text)
        return found[1] if found else None


def container(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """The kind of container that this runs in, or "none"."""
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for name in ("SINGULARITY_NAME", "APPTAINER_NAME"):
        if environment.get(name):
            return "apptainer"
    for file, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / file).exists():
            return kind
    return environment.get("container") or NONE
