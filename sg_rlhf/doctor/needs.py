"""What an installation, a machine in general or a recipe needs. `checks` compares it with facts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sg_rlhf.doctor.facts import Gpu

#: Size in a hardware name, GB -> least MiB that such a GPU reports (an A10 of 24 GB: 23,028). The
#: training scripts use the same numbers.
SIZES = {80: 75_000, 40: 39_000, 24: 22_000}
COUNTS = (8, 4, 2, 1)
#: GPU type -> size, as in sg_rlhf/plan/gpu_types.py and examples/scripts/common.sh.
TYPES = {
    "a100": 80, "a800": 80, "h100-pcie": 80, "h100": 80, "h800": 80, "h200": 80, "b200": 80,
    "a100-40gb": 40, "l40s": 40, "6000ada": 40, "a6000": 40, "a40": 40,
    "5090": 24, "4090": 24, "3090": 24, "l4": 24, "a10": 24,
}  # fmt: skip
#: Names from before COUNTxSIZEgb -> (number of GPUs, GB).
_OLDER = {"1xgpu": (1, 24), "cuda": (None, None)}


@dataclass(frozen=True)
class Needs:
    """What is needed. The defaults are for a machine in general.

    Attributes:
        gpus: GPUs of a node; 0 for a run without GPUs, None for any number.
        gpu_gb: memory of each GPU, GB, by the hardware's name.
        nodes: number of machines; the facts are those of one.
        install: "cpu" or "cuda" when scripts/bootstrap.sh is about to install it; else "".
        recipe: whether a recipe is checked, and not a machine in general.
        nvcc_for: what must be compiled with nvcc; "" for nothing, as in all our recipes.
        host_gib: host memory of a node, GiB.
        model: id or folder of the policy.
        gated: whether the model's download needs a token.
        model_gb: size of the download, GB.
        data: files that the recipe reads.
        run_gb: size of everything that the run writes, GB; mostly checkpoints.
        retriever: URL of the recipe's retriever.
    """

    gpus: int | None = None
    gpu_gb: int | None = None
    nodes: int = 1
    install: str = ""
    recipe: bool = False
    nvcc_for: str = ""
    host_gib: float | None = None
    model: str = ""
    gated: bool = False
    model_gb: float | None = None
    data: tuple[str, ...] = ()
    run_gb: float | None = None
    retriever: str = ""


def of_hardware(name: str) -> Needs:
    """The needs of a hardware name as in SG_HARDWARE; "" for any hardware.

    Raises:
        ValueError: an unknown name.
    """
    if not name:
        return Needs()
    if name == "cpu":
        return Needs(gpus=0)
    nodes = 1
    if name in _OLDER:
        gpus, size = _OLDER[name]
    else:
        kinds = {f"{gb}gb": gb for gb in sorted(SIZES)}
        kinds.update(TYPES)
        found = re.match(r"(?:([1-9]\d*)x)?([1-9]\d*)x([a-z0-9-]+)$", name.lower())
        if not found or found[3] not in kinds:
            raise ValueError(
                f"SG_HARDWARE={name}: expected cpu, or [NODESx]COUNTx followed by a size or a type "
                f"of GPU, such as 8x80gb or 8xh200: {', '.join(kinds)}"
            )
        nodes, gpus, size = int(found[1] or 1), int(found[2]), kinds[found[3]]
    return Needs(gpus=gpus, gpu_gb=size, nodes=nodes)


def models_of(gpus: int, size: int, memory_gib: float | None = None) -> str:
    """The largest models that the training scripts train on a machine (as in common.sh).

    Args:
        gpus: number of GPUs.
        size: memory of each, GB.
        memory_gib: host memory; None if it is large enough.
    """
    large = size == 80 or (size == 40 and gpus >= 4)
    middle = large or size == 40 or gpus >= 4
    if memory_gib is not None:  # examples/scripts/common.sh, fit_host
        large = large and int(memory_gib) >= 160 + 36 * gpus
        middle = middle and int(memory_gib) >= (0 if large else 67 + 20 * gpus)
    if large:
        return "models of 3B to 8B"
    return "models of 3B" if middle else "reduced recipes of 0.5B"


def size_of(memory_mib: float) -> int | None:
    """The size class of a GPU, in GB; None if it is below the smallest."""
    return next((size for size, least in SIZES.items() if memory_mib >= least), None)


def suggested_hardware(gpus: Sequence[Gpu]) -> str:
    """The SG_HARDWARE that uses most of these GPUs; "" if they are too small."""
    size = size_of(min((gpu.memory_mib for gpu in gpus), default=0))
    if not gpus:
        return "cpu"
    count = next(count for count in COUNTS if count <= len(gpus))
    return f"{count}x{size}gb" if size else ""
