"""Checks of GPUs, their driver and CUDA's toolkit.

The stack is torch 2.13 with CUDA 13.0. CUDA 13.x needs driver 580 or later
(docs.nvidia.com/deploy/cuda-compatibility). An older driver supports it with NVIDIA's package for
forward compatibility. bf16 and vLLM's FlashAttention need compute capability 8.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.facts import NONE
from sg_rlhf.doctor.needs import suggested_hardware
from sg_rlhf.machine.names import SIZES

if TYPE_CHECKING:
    from sg_rlhf.doctor.facts import Facts, Gpu
    from sg_rlhf.doctor.needs import Needs

DRIVER, CUDA, CAPABILITY = 580, 13, (8, 0)
#: Memory of other processes on a GPU above which the doctor warns, MiB; a desktop takes less.
BUSY_MIB = 2048
ON_CPU = "SG_HARDWARE=cpu goes without GPUs"


def used(facts: Facts, needs: Needs) -> list[Gpu]:
    """The GPUs that a run would use; all if the needs do not say how many."""
    gpus = facts.gpus or []
    return gpus if needs.gpus is None else gpus[: needs.gpus]


def settings_for(gpus: list[Gpu], needs: Needs) -> str:
    """The setting that uses most of these GPUs; "" if they are too small.

    SG_HARDWARE is for the training scripts. `train` has a flag.
    """
    name = suggested_hardware(gpus)
    if not name:
        return ""
    return f"--hardware {name}" if needs.recipe else f"SG_HARDWARE={name}"


def checks(facts: Facts, needs: Needs) -> list[Check]:
    """All checks of GPUs; one skipped check if none are needed."""
    if needs.gpus == 0:
        return [Check("GPUs", SKIPPED, _described(facts), "none")]
    return [count(facts, needs), *_of_gpus(facts, needs), *_together(facts, needs)]


def before_installing(facts: Facts, needs: Needs) -> list[Check]:
    """Checks before an installation: would CUDA packages be useless, or CPU packages a mistake?

    A missing GPU is no fault, because images are built on machines without one.
    """
    if needs.install == "cpu":
        if needs.gpus == 0 or not facts.gpu_problem:
            return []
        return [replace(count(facts, needs), status=WARNING, needed="")]
    return [*_of_gpus(facts, needs), *([memory(facts, needs)] if used(facts, needs) else [])]


def _of_gpus(facts: Facts, needs: Needs) -> list[Check]:
    if facts.gpus == [] and not facts.gpu_problem and not needs.install:
        return []
    return [driver(facts), capability(facts, needs), toolkit(facts, needs)]


def _together(facts: Facts, needs: Needs) -> list[Check]:
    gpus = used(facts, needs)
    found = [memory(facts, needs), busy(gpus)] if gpus else []
    if len(gpus) > 1:
        found.append(nvlink(facts, len(gpus)))
    if facts.mig and gpus:
        found.append(mig())
    return [check for check in found if check]


def _described(facts: Facts) -> str:
    if facts.gpus is None:
        return facts.gpu_problem or "unknown"
    if not facts.gpus:
        return f"none ({facts.gpu_problem})" if facts.gpu_problem else "none"
    names = sorted({gpu.name for gpu in facts.gpus})
    return f"{len(facts.gpus)} x {' and '.join(names)}"


def count(facts: Facts, needs: Needs) -> Check:
    """Number of GPUs: as many as the recipe needs; any number for a machine in general."""
    found = _described(facts)
    wanted = needs.gpus
    needed = f"{wanted}" if wanted else "any number"
    needed += f" on each of {needs.nodes} nodes" if needs.nodes > 1 else ""
    if facts.gpu_problem and not facts.gpus:
        found = f"none; nvidia-smi: {facts.gpu_problem}"
        remedy = "repair the driver until `nvidia-smi` lists the GPUs (dmesg says more)"
        return Check("GPUs", FAILED, found, needed, f"{remedy}, or {ON_CPU}")
    if facts.gpus is None:
        return Check("GPUs", SKIPPED, found, needed)
    if wanted is None:
        remark = "" if facts.gpus else "the small models train without"
        return Check("GPUs", OK, found, needed, remark=remark)
    if not facts.gpus:
        remedy = "run it where GPUs are (CUDA_VISIBLE_DEVICES must name them), or a CPU recipe"
        return Check("GPUs", FAILED, found, needed, f"{remedy}: configs/kk/grpo_sg_tiny_cpu.yaml")
    if len(facts.gpus) < wanted:
        name = settings_for(facts.gpus, needs)
        remedy = f"{name} is for these" if name else "fewer ranks: actor.num_gpus_per_node"
        return Check("GPUs", FAILED, found, needed, remedy)
    spare = len(facts.gpus) - wanted
    remark = f"{spare} stay idle; {settings_for(facts.gpus, needs)} uses more"
    return Check("GPUs", OK, found, needed, remark=remark if spare >= wanted else "")


def driver(facts: Facts) -> Check:
    """Driver 580 or later, or one whose library supports CUDA 13."""
    needed = f"{DRIVER} or later, for CUDA {CUDA}"
    if facts.driver in (None, NONE):
        status = SKIPPED if facts.driver is None or not facts.gpus else FAILED
        return Check("driver", status, facts.driver or "unknown", needed)
    found = str(facts.driver)
    if int(found.split(".")[0]) >= DRIVER:
        return Check("driver", OK, found, needed)
    if facts.driver_cuda and int(facts.driver_cuda.split(".")[0]) >= CUDA:
        remark = f"with forward compatibility to CUDA {facts.driver_cuda}"
        return Check("driver", OK, found, needed, remark=remark)
    newest = f" (CUDA {facts.driver_cuda})" if facts.driver_cuda else ""
    remedy = f"update NVIDIA's driver to {DRIVER} or later, or {ON_CPU}"
    return Check("driver", FAILED, found + newest, needed, remedy)


def capability(facts: Facts, needs: Needs) -> Check:
    """Compute capability of the oldest GPU: 8.0 or later."""
    needed = "8.0 or later, for bf16 and vLLM"
    known = [gpu.compute_capability for gpu in used(facts, needs) if gpu.compute_capability]
    if not known:
        return Check("compute capability", SKIPPED, "unknown", needed)
    least = min(known, key=_numbers)
    if _numbers(least) >= CAPABILITY:
        return Check("compute capability", OK, least, needed)
    remedy = f"Ampere or a later GPU (A100, RTX 30 and on), or {ON_CPU}"
    return Check("compute capability", FAILED, least, needed, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def toolkit(facts: Facts, needs: Needs) -> Check:
    """nvcc of any CUDA 13, if something must be compiled."""
    needed = f"{CUDA}.x, to compile {needs.nvcc_for}" if needs.nvcc_for else "none"
    found = facts.cuda_toolkit
    if found is None:
        return Check("CUDA toolkit", SKIPPED, "unknown", needed)
    if found != NONE and _numbers(found)[0] == CUDA:
        return Check("CUDA toolkit", OK, found, needed)
    if needs.nvcc_for:
        get = "install it (cuda-toolkit-13-0 of NVIDIA's repository) and set CUDA_HOME to it"
        return Check("CUDA toolkit", FAILED, found, needed, f"{get}, or {ON_CPU}")
    if found == NONE:
        return Check("CUDA toolkit", OK, found, needed)
    remedy = "nothing here is compiled with it; flash-attn or another kernel of your own would be"
    return Check("CUDA toolkit", WARNING, found, needed, remedy)


def memory(facts: Facts, needs: Needs) -> Check:
    """Memory of the smallest GPU, against the size in the hardware's name."""
    gpus = used(facts, needs)
    least = min(gpu.memory_mib for gpu in gpus)
    found = f"{least / 1024:.0f} GiB each"
    if max(gpu.memory_mib for gpu in gpus) > 1.1 * least:
        found = f"{least / 1024:.0f} GiB in the smallest"
    size = needs.gpu_gb or min(SIZES)
    needed = f"{size} GB"
    if least >= SIZES[size]:
        return Check("GPU memory", OK, found, needed)
    name = settings_for(gpus, needs)
    if needs.gpu_gb and name:
        return Check("GPU memory", FAILED, found, needed, f"{name} is for these")
    remedy = "smaller than any recipe is for: lower train.micro_batch_size and data.max_len"
    return Check("GPU memory", WARNING, found, needed, remedy)


def busy(gpus: list[Gpu]) -> Check | None:
    """Memory that other processes already use."""
    taken = {i: gpu.used_mib for i, gpu in enumerate(gpus) if (gpu.used_mib or 0) > BUSY_MIB}
    if not taken:
        return None
    most = max(taken.values(), key=lambda mib: mib or 0) or 0
    found = f"{len(taken)} of {len(gpus)} in use, up to {most / 1024:.0f} GiB"
    remedy = "`nvidia-smi` names the processes; end them, or choose others by CUDA_VISIBLE_DEVICES"
    return Check("GPUs free", WARNING, found, "GPUs of our own", remedy)


def nvlink(facts: Facts, gpus: int) -> Check:
    """NVLink between all pairs: ZeRO-3 gathers every layer's weights from all GPUs at each use."""
    needed = f"between all {gpus} GPUs"
    if facts.nvlink is None:
        return Check("NVLink", SKIPPED, "unknown", needed)
    if facts.nvlink == "all":
        return Check("NVLink", OK, "all pairs", needed)
    found = "some pairs" if facts.nvlink == "some" else "none"
    remedy = "it works, more slowly: ZeRO-3 and weight syncs cross PCIe"
    return Check("NVLink", WARNING, found, needed, remedy)


def mig() -> Check:
    """MIG: CUDA gives a process a single slice, and NCCL does not connect slices."""
    remedy = "CUDA sees one slice alone; `nvidia-smi -mig 0` (as root) joins them again"
    return Check("MIG", WARNING, "on", "off", remedy)
