"""A stand-in for pynvml: a machine's driver and GPUs as a test describes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

#: (name, MiB, MiB in use, compute capability)
H100 = ("NVIDIA H100 80GB HBM3", 81559, 1, (9, 0))
GpuRow = tuple[str, int, int, tuple[int, int]]


class FakeNvml:
    """The functions of pynvml that `sg_rlhf.machine.gpus` calls; handles are rows."""

    NVML_P2P_CAPS_INDEX_NVLINK = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    NVML_P2P_STATUS_OK = pynvml.NVML_P2P_STATUS_OK
    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported

    def __init__(
        self, gpus: Sequence[GpuRow], driver: str, cuda: int, linked: Any, slices: Sequence[GpuRow],
        fault: int | None,
    ) -> None:  # fmt: skip
        self.gpus, self.slices = list(enumerate(gpus)), list(enumerate(slices))
        self.driver, self.cuda, self.linked, self.fault = driver, cuda, linked, fault

    def nvmlInit(self) -> None:
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{handle[0]}a8f3c52-0000"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle[1][0])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=handle[1][1] * 2**20, used=handle[1][2] * 2**20)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return handle[1][3]

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        if not self.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(handle[0] == 0), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index >= len(self.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.slices[index]

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, _index: int) -> int:
        linked = self.linked if isinstance(self.linked, bool) else (one[0], other[0]) in self.linked
        return pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


def install(
    monkeypatch: pytest.MonkeyPatch,
    *gpus: GpuRow,
    driver: str = "580.95.05",
    cuda: int = 13000,
    linked: bool | set[tuple[int, int]] = True,
    slices: Sequence[GpuRow] = (),
    fault: int | None = None,
) -> None:
    """Let this machine have these GPUs.

    Args:
        linked: whether NVLink connects all pairs, or which.
        slices: MIG slices of the first GPU.
        fault: the error code of ``nvmlInit``.
    """
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        FakeNvml(gpus, driver, cuda, linked, slices, fault),
    )
