"""The GPUs of this machine, from ``nvidia-smi`` and the driver."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.common.resources import visible_gpus
from sg_rlhf.machine.probes import Question

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

NONE = "none"
#: Limit for ``nvidia-smi``, whose driver may hang.
SECONDS = 5.0
_FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_cap",
)  # fmt: skip
#: Fields that drivers of CUDA 11.3 and before also have.
_OLD_FIELDS = _FIELDS[:6]
#: nvidia-smi of WSL, which is not on the PATH.
_PLACES = ("/usr/lib/wsl/lib/nvidia-smi",)


@dataclass(frozen=True)
class Gpu:
    """One GPU, as ``nvidia-smi`` prints it.

    Attributes:
        memory_mib: all of its memory, MiB.
        compute_capability: such as "9.0"; None with an old driver.
        used_mib: memory already in use, MiB.
    """

    name: str
    memory_mib: float
    compute_capability: str | None = None
    used_mib: float | None = None


class NvidiaSmi:
    """Probes of ``nvidia-smi``, started at construction."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        places = [shutil.which("nvidia-smi", path=environment.get("PATH", ""))]
        self._program = next((p for p in [*places, *_PLACES] if p and Path(p).exists()), None)
        self._environment = environment
        self._seconds = seconds
        if self._program is None:
            return
        self._deadline = time.monotonic() + seconds
        self._gpus = self._ask(*_query(_FIELDS))
        self._header = self._ask()
        self._links = self._ask("topo", "-m")
        self._list = self._ask("-L")

    def _ask(self, *arguments: str) -> Question:
        assert self._program is not None
        return Question([self._program, *arguments], self._environment)

    def facts(self) -> dict[str, Any]:
        """The fields gpus, gpu_problem, driver, driver_cuda, mig and nvlink of `Facts`."""
        loaded = loaded_driver()
        if self._program is None:
            return {"gpus": [], "driver": loaded or NONE}
        status, text = self._gpus.answer(self._deadline)
        more = (self._header, self._links, self._list)
        header, links, listed = (question.answer(self._deadline)[1] for question in more)
        if status is None:
            return {
                "gpus": None,
                "driver": loaded,
                "gpu_problem": f"it gave no answer within {self._seconds:g} s",
            }
        names: tuple[str, ...] = _FIELDS
        if status and "not a valid field" in text:
            names = _OLD_FIELDS
            status, text = self._ask(*_query(names)).answer(self._deadline)
        rows = [_row(names, line) for line in text.splitlines() if line.count(",") >= 5]
        if status or not rows:
            problem = next((line.strip() for line in text.splitlines() if line.strip()), "")
            return {"gpus": [], "driver": loaded or NONE, "gpu_problem": problem or "no output"}
        seen = visible(rows, self._environment.get("CUDA_VISIBLE_DEVICES"))
        slices = mig_slices(listed)
        speaks = re.search(r"CUDA Version:\s*(\d+\.\d+)", header)
        return {
            "gpus": [replace(_gpu(seen[0]), **slices)] if seen and slices else [*map(_gpu, seen)],
            "driver": _known(rows[0]["driver_version"]) or loaded,
            "driver_cuda": speaks[1] if speaks else None,
            "mig": bool(slices),
            "nvlink": nvlink(links, [int(row["index"]) for row in seen]),
        }


def _query(names: tuple[str, ...]) -> tuple[str, str]:
    return f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"


def _row(names: tuple[str, ...], line: str) -> dict[str, str]:
    return {names[i]: cell.strip() for i, cell in enumerate(line.split(",")) if i < len(names)}


def _known(cell: str | None) -> str | None:
    """A value; None for ``[N/A]``, ``[Not Supported]``, ``[Insufficient Permissions]``."""
    return cell if cell and not cell.startswith("[") else None


def _gpu(row: dict[str, str]) -> Gpu:
    used = _known(row["memory.used"])
    return Gpu(
        name=row["name"],
        memory_mib=float(_known(row["memory.total"]) or 0),
        compute_capability=_known(row.get("compute_cap")),
        used_mib=None if used is None else float(used),
    )


def visible_devices() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    chosen = visible_gpus()
    if chosen is not None:
        return chosen
    found = NvidiaSmi(os.environ, SECONDS).facts()["gpus"]
    return [str(i) for i in range(len(found or []))]


def mig_slices(listed: str) -> dict[str, Any]:
    """Name and memory of the smallest MIG slice in ``nvidia-smi -L``; {} without MIG."""
    found = re.findall(r"^\s+MIG (\S*?(\d+)gb\S*)", listed, re.MULTILINE)
    if not found:
        return {}
    name, gb = min(found, key=lambda slice: int(slice[1]))
    return {"name": f"MIG {name}", "memory_mib": float(gb) * 1000, "used_mib": None}


def visible(rows: list[dict[str, str]], chosen: str | None) -> list[dict[str, str]]:
    """The GPUs of CUDA_VISIBLE_DEVICES in its order; as in CUDA, up to the first bad entry."""
    if chosen is None:
        return rows
    found = []
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        fit = [
            r for r in rows if r["index"] == name or (r["uuid"].startswith(name) and len(name) > 4)
        ]
        if not fit:
            break
        found.append(fit[0])
    return found


def nvlink(matrix: str, indices: list[int]) -> str | None:
    """Whether all, some or none of the GPU pairs have NVLink, from ``nvidia-smi topo -m``.

    None if there is no pair or no matrix.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = {}
    for line in plain.splitlines():
        found = re.match(r"GPU(\d+)\s+(.*)", line.strip())
        # The heading begins with GPU0, too; its cells are names.
        if found and not found[2].startswith("GPU"):
            rows[int(found[1])] = found[2].split()
    order = sorted(rows)
    cells = [
        rows[i][order.index(j)]
        for i in order
        for j in order
        if i < j and i in indices and j in indices and len(rows[i]) >= len(order)
    ]
    if not cells:
        return None
    linked = [cell.startswith("NV") for cell in cells]
    return "all" if all(linked) else "some" if any(linked) else NONE


def loaded_driver(root: Path = Path("/")) -> str | None:
    """Version of the loaded kernel driver; None if none is loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Module\s.*?(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else None
