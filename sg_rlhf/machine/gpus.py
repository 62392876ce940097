"""The GPUs of this machine and their driver, by NVIDIA's management library (NVML)."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sg_rlhf.common.resources import visible_gpus
from sg_rlhf.common.text import notice_if_slow
from sg_rlhf.machine import names
from sg_rlhf.machine.facts import Facts, Gpu, Links

#: Seconds; a driver without its persistence mode takes several for each GPU.
TIMEOUT_S = 30.0


def detect(environment: Mapping[str, str] = os.environ) -> Facts:
    """The GPUs and the driver of this machine; of the other facts, none.

    The driver is asked in a thread: with a broken GPU its calls may never return.
    """
    found: Future[Facts] = Future()

    def ask() -> None:
        try:
            found.set_result(_ask(environment))
        except BaseException as error:  # raised again in the caller
            found.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="NVML").start()
    try:
        with notice_if_slow(f"waiting for the GPU driver (up to {TIMEOUT_S:g} s)"):
            return found.result(TIMEOUT_S)
    except TimeoutError:
        return Facts(gpu_problem=f"the driver did not answer within {TIMEOUT_S:g} s")


def _ask(environment: Mapping[str, str]) -> Facts:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Facts()
    except nvml.NVMLError as error:
        return Facts(gpu_problem=str(error))
    try:
        return _detect(nvml, environment)
    except nvml.NVMLError as error:
        return Facts(gpu_problem=str(error))
    finally:
        nvml.nvmlShutdown()


def _detect(nvml: Any, environment: Mapping[str, str]) -> Facts:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    known = [(str(i), nvml.nvmlDeviceGetUUID(handle)) for i, handle in enumerate(handles)]
    seen = [handles[i] for i in _visible(known, visible_gpus(environment))]
    gpus = [_gpu(nvml, handle, handle) for handle in seen]
    slices = [_gpu(nvml, part, whole) for whole in seen for part in _slices(nvml, whole)]
    if slices:
        gpus = [min(slices, key=lambda gpu: gpu.memory_mib)]
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return Facts(
        gpus=gpus,
        gpu_problem=None if handles else "the driver lists no GPU",
        driver=nvml.nvmlSystemGetDriverVersion(),
        driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        nvlink=_nvlink(nvml, seen),
    )


def _gpu(nvml: Any, handle: Any, whole: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_mib=memory.total / 2**20,
        compute_capability=f"{major}.{minor}",
        used_mib=memory.used / 2**20,
    )


def _slices(nvml: Any, handle: Any) -> Iterator[Any]:
    """The MIG slices of a GPU."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError_NotSupported:
        return
    for i in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
        except nvml.NVMLError_NotFound:
            continue


def _nvlink(nvml: Any, handles: list[Any]) -> Links | None:
    """Whether all, some or none of the pairs have NVLink; None without a pair."""
    linked = [
        nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        == nvml.NVML_P2P_STATUS_OK
        for pair in itertools.combinations(handles, 2)
    ]
    if not linked:
        return None
    return "all" if all(linked) else "some" if any(linked) else "none"


def _visible(known: list[tuple[str, str]], chosen: list[str] | None) -> list[int]:
    """Positions in ``known``, (index, UUID), of the chosen GPUs; None for all.

    As in CUDA, up to the first index or beginning of a UUID that fits none.
    """
    if chosen is None:
        return list(range(len(known)))
    found = []
    for given in chosen:
        fit = [
            i
            for i, (index, uuid) in enumerate(known)
            if given == index or (len(given) > 4 and uuid.startswith(given))
        ]
        if not fit:
            break
        found.append(fit[0])
    return found


def hardware_name(gpus: Sequence[Gpu]) -> str:
    """:func:`sg_rlhf.machine.names.name_of` these GPUs."""
    return names.name_of(len(gpus), min((gpu.memory_mib for gpu in gpus), default=0))


def visible_devices() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    chosen = visible_gpus()
    return [str(i) for i in range(len(detect().gpus))] if chosen is None else chosen
