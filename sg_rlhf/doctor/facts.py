"""Facts about a machine: gathered on it, or read from JSON that describes another one.

None means unknown, and the check is skipped. "none" means that the machine does not have it.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from sg_rlhf.machine.gpus import NONE, Gpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

#: Where a model can be (`Facts.models`).
FOLDER, CACHE, ABSENT = "folder", "cache", "absent"
#: What can listen where a recipe expects its retriever (`Facts.retriever`).
RETRIEVER, STRANGER, UNTRUSTED, NOBODY = (
    "retriever", "something else", "untrusted certificate", "nothing",
)  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """A file system.

    Attributes:
        holds: which of our folders are on it: `environment` (.venv), `run` (the run directory),
            `models` (the hub's cache).
        path: one of these folders.
        free_gb: free space, GB (1e9 bytes).
    """

    holds: list[str]
    path: str
    free_gb: float


@dataclass(frozen=True)
class Python:
    """The interpreter that an installation would use, else the running one."""

    version: str
    path: str = ""
    headers: bool | None = None
    venv: bool | None = None


@dataclass(frozen=True)
class Hub:
    """The Hugging Face hub, seen from here.

    Attributes:
        host: its host name, with the proxy's if there is one.
        reachable: whether a connection was made; None if it was not tried.
        offline: ``HF_HUB_OFFLINE`` is set.
        token: whether there is one (its value is never read into facts).
    """

    host: str = "huggingface.co"
    reachable: bool | None = None
    offline: bool = False
    token: bool | None = None


@dataclass(frozen=True)
class Facts:
    """One machine. The module's docstring explains None and "none".

    Attributes:
        gpus: visible GPUs (CUDA_VISIBLE_DEVICES).
        gpu_problem: nvidia-smi's error message.
        driver: NVIDIA's, such as "580.65.06".
        driver_cuda: newest CUDA version of the driver's library; may be newer than the driver
            with NVIDIA's package for forward compatibility.
        mig: GPUs are split into MIG slices; `gpus` is then the one slice that a process gets.
        nvlink: whether all pairs of GPUs have it, some, or none.
        cuda_toolkit: nvcc's release, such as "13.0".
        cgroup_memory_gib: the limit of this container or job, GiB; None without one.
        ulimit_nofile: open files that a process may have, the hard limit.
        cores: that this process may use, by affinity and quota.
        ports_in_use: ports of Ray where something listens.
        flash_attn: the package flash-attn is installed.
        written_gb: size of the run directory (of a resumed run), GB.
        installed: the packages are installed.
        retriever: what listens at the recipe's retriever URL.
        models: name -> folder, cache or absent.
        data: name of a file that the recipe reads -> whether it exists.
        wandb: `key`, `offline` (WANDB_MODE), `netrc` (only a login there) or `none`.
        container, slurm: whether this process runs in one.
        ray_address: the cluster that a run would join.
    """

    gpus: list[Gpu] | None = None
    gpu_problem: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    mig: bool | None = None
    nvlink: str | None = None
    cuda_toolkit: str | None = None
    host_memory_gib: float | None = None
    cgroup_memory_gib: float | None = None
    dev_shm_mib: float | None = None
    disks: list[Disk] | None = None
    python: Python | None = None
    compiler: str | None = None
    ulimit_nofile: int | None = None
    cores: int | None = None
    ports_in_use: list[int] | None = None
    flash_attn: bool | None = None
    written_gb: float | None = None
    installed: bool | None = None
    retriever: str | None = None
    hub: Hub | None = None
    models: dict[str, str] = field(default_factory=dict)
    data: dict[str, bool] = field(default_factory=dict)
    wandb: str | None = None
    container: str | None = None
    slurm: bool | None = None
    ray_address: str | None = None

    @property
    def memory_gib(self) -> float | None:
        """Host memory that a run can use, GiB."""
        known = [m for m in (self.host_memory_gib, self.cgroup_memory_gib) if m is not None]
        return min(known, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; :func:`parse` reads them back."""
        return asdict(self)


class FactsError(ValueError):
    """An invalid description of a machine; the message is one line."""


def read(file: Path) -> Facts:
    """Read the facts of a machine from a JSON file.

    Raises:
        FactsError: one line with the file, the key, the value and what was expected.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FactsError(f"--facts {file}: cannot be read as JSON: {reason}") from None
    if isinstance(found, dict) and set(found) == {"facts", "checks", "verdict"}:
        found = found["facts"]  # what --json printed
    try:
        return parse(found)
    except FactsError as error:
        raise FactsError(f"--facts {file}: {error}") from None


def parse(found: Any) -> Facts:
    """Facts from plain values, the inverse of `Facts.to_json`.

    Raises:
        FactsError: an unknown key, or a value of another kind.
    """
    values = _fields(found, Facts, "")
    if values.get("gpus") is not None:
        values["gpus"] = [Gpu(**_fields(g, Gpu, "gpus: ")) for g in values["gpus"]]
    if values.get("disks") is not None:
        values["disks"] = [Disk(**_fields(d, Disk, "disks: ")) for d in values["disks"]]
    for name, kind in (("python", Python), ("hub", Hub)):
        if values.get(name) is not None:
            values[name] = kind(**_fields(values[name], kind, name + ": "))
    return Facts(**values)


def _one_of(*names: str) -> tuple[str, Callable[[Any], bool]]:
    return "one of " + ", ".join(names), lambda v: v in names


def _number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < float("inf")


def _whole(v: Any) -> bool:
    return _number(v) and v == int(v)


def _version(v: Any) -> bool:
    # Not isdigit() alone, which takes a superscript two.
    return isinstance(v, str) and all(p.isascii() and p.isdigit() for p in v.split("."))


def _text(v: Any) -> bool:
    return isinstance(v, str)


def _list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and all(of(one) for one in v)


def _dict(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, dict) and all(of(one) for one in v.values())


def _flag(v: Any) -> bool:
    return isinstance(v, bool)


def _mapping(v: Any) -> bool:
    return isinstance(v, dict)


_GB = "a number, 0 or more"
_YES = "true or false"
#: Key -> (what is expected, test of a value).
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "gpus": ("a list of {name, memory_mib, compute_capability}", _list(_mapping)),
    "gpus: name": ("text", _text),
    "gpus: memory_mib": (_GB, _number),
    "gpus: compute_capability": ('a version such as "9.0"', _version),
    "gpus: used_mib": (_GB, _number),
    "gpu_problem": ("text", _text),
    "driver": ('a version such as "580.65.06", or "none"', lambda v: v == NONE or _version(v)),
    "driver_cuda": ('a version such as "13.0"', _version),
    "mig": (_YES, _flag),
    "nvlink": _one_of("all", "some", NONE),
    "cuda_toolkit": ('a version such as "13.0", or "none"', lambda v: v == NONE or _version(v)),
    "host_memory_gib": (_GB, _number),
    "cgroup_memory_gib": (_GB, _number),
    "dev_shm_mib": (_GB, _number),
    "disks": ("a list of {holds, path, free_gb}", _list(_mapping)),
    "disks: holds": (
        "a list of environment, run, models",
        _list(lambda v: v in ("environment", "run", "models")),
    ),
    "disks: path": ("text", _text),
    "disks: free_gb": (_GB, _number),
    "python": ("{version, path, headers, venv}", _mapping),
    "python: version": ('a version such as "3.11.7"', _text),
    "python: path": ("text", _text),
    "python: headers": (_YES, _flag),
    "python: venv": (_YES, _flag),
    "compiler": ('text, or "none"', _text),
    "ulimit_nofile": ("a whole number", _whole),
    "cores": ("a whole number", _whole),
    "ports_in_use": ("a list of ports", _list(_whole)),
    "flash_attn": (_YES, _flag),
    "written_gb": (_GB, _number),
    "installed": (_YES, _flag),
    "retriever": _one_of(RETRIEVER, STRANGER, UNTRUSTED, NOBODY),
    "hub": ("{host, reachable, offline, token}", _mapping),
    "hub: host": ("text", _text),
    "hub: reachable": (_YES, _flag),
    "hub: offline": (_YES, _flag),
    "hub: token": (_YES, _flag),
    "models": (
        f"{{name: {FOLDER}, {CACHE} or {ABSENT}}}",
        _dict(lambda v: v in (FOLDER, CACHE, ABSENT)),
    ),
    "data": ("{file: true or false}", _dict(_flag)),
    "wandb": _one_of("key", "offline", "netrc", NONE),
    "container": ('text, or "none"', _text),
    "slurm": (_YES, _flag),
    "ray_address": ("text", _text),
}
_NEVER_NULL = ("models", "data", "gpus: name", "gpus: memory_mib", "disks: holds", "disks: path")


def _fields(found: Any, kind: type, prefix: str) -> dict[str, Any]:
    """The validated values of one object."""
    if not isinstance(found, dict):
        raise FactsError(f"{prefix}expected an object, found {json.dumps(found)[:60]}")
    known = {f.name: f for f in fields(kind)}
    for key, value in found.items():
        if key not in known:
            near = difflib.get_close_matches(key, list(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise FactsError(f"{prefix}unknown key {key!r}; {hint}")
        expected, fits = _EXPECTED[prefix + key]
        nullable = prefix + key not in _NEVER_NULL
        if not (value is None and nullable) and not fits(value):
            raise FactsError(f"{prefix}{key}={json.dumps(value)[:60]}: expected {expected}")
    needed = {"gpus: ": ("name", "memory_mib"), "disks: ": ("holds", "path", "free_gb")}
    for key in (*needed.get(prefix, ()), *(("version",) if prefix == "python: " else ())):
        if key not in found:
            raise FactsError(f"{prefix}{key} is missing: expected {_EXPECTED[prefix + key][0]}")
    return dict(found)
