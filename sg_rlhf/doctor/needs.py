"""What an installation, a machine in general or a recipe needs. `checks` compares it with facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sg_rlhf.machine import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sg_rlhf.machine.gpus import Gpu

#: SG_HARDWARE for scripts/bootstrap.sh: CUDA packages, whatever the GPUs.
ANY_GPUS = "cuda"


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
    if name in ("", ANY_GPUS):
        return Needs()
    try:
        layout = names.parse(name)
    except ValueError as error:
        raise ValueError(f"SG_HARDWARE={error}") from None
    return Needs(gpus=layout.gpus, gpu_gb=layout.size or None, nodes=layout.nodes)


def suggested_hardware(gpus: Sequence[Gpu]) -> str:
    """The hardware name that uses most of these GPUs; "" if they are too small."""
    return names.name_of(len(gpus), min((gpu.memory_mib for gpu in gpus), default=0))
