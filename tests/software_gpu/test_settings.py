"""The software GPU's settings, NVML, nvidia-smi, stubs and build.

Run with the Python of an environment in which device/build.py has put it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.software_gpu import children
from tests.software_gpu.children import Machine

MIB = 2**20
GIB = 2**30
CONTEXT_MIB = 520
NO_DEVICE = 100
NOT_SUPPORTED = 801
pytestmark = pytest.mark.skipif(children.missing() is not None, reason=str(children.missing()))


def describe() -> None:
    import pynvml
    import torch

    torch.cuda.synchronize()
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = {
        "names": [one.name for one in properties],
        "uuids": [f"GPU-{one.uuid}" for one in properties],
        "gib": [one.total_memory / GIB for one in properties],
        "capabilities": [[one.major, one.minor] for one in properties],
        "nvml": [
            [
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetMemoryInfo(handle).used / MIB,
                list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
            ]
            for handle in handles
        ],
        "pid": os.getpid(),
    }
    print(json.dumps(found))


@pytest.mark.parametrize("chosen", ["1,0", "uuids"])
def test_cuda_visible_devices_chooses_and_orders(machine: Machine, chosen: str) -> None:
    uuids = [f"GPU-0000000{i}-736f-6674-7761-72652d677075" for i in range(3)]
    visible = "GPU-00000001,GPU-00000000" if chosen == "uuids" else chosen
    found = json.loads(
        machine.run(
            describe, SOFTWARE_GPU_COUNT="3", SOFTWARE_GPU_CAPABILITY="8.0",
            SOFTWARE_GPU_NAME="Software GPU (A100)", CUDA_VISIBLE_DEVICES=visible,
        )
    )  # fmt: skip
    assert found["uuids"] == [uuids[1], uuids[0]]
    assert found["names"] == ["Software GPU (A100)"] * 2
    assert found["gib"] == [4, 4]
    assert found["capabilities"] == [[8, 0]] * 2
    # NVML knows all devices. The context is on the first visible one.
    expected = [
        ["Software GPU (A100)", uuids[i], CONTEXT_MIB * (i == 1), [8, 0], [found["pid"]] * (i == 1)]
        for i in range(3)
    ]
    assert found["nvml"] == expected


def initialise() -> None:
    sys.exit(ctypes.CDLL("libcuda.so.1").cuInit(0))


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"SOFTWARE_GPU_NAME": "NVIDIA H100"}, 'must contain "Software GPU"'),
        ({"SOFTWARE_GPU_TABLE": ""}, "expected a file under /dev/shm"),
        ({"SOFTWARE_GPU_CAPABILITY": "90"}, "expected two numbers such as 9.0"),
        ({"SOFTWARE_GPU_COUNT": "two"}, "expected a number above 0"),
        ({"SOFTWARE_GPU_COUNT": "17"}, "expected at most 16"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_wrong_settings_leave_no_device(
    machine: Machine, variables: dict[str, str], line: str
) -> None:
    child = machine.start(initialise, **variables)
    output, _ = child.communicate(timeout=children.SECONDS)
    assert child.returncode == NO_DEVICE
    assert line in output
    assert output.startswith("[software GPU]" if line else "")


def test_a_table_of_another_layout_is_refused(machine: Machine) -> None:
    machine.table.write_text("another layout")
    child = machine.start(initialise)
    output, _ = child.communicate(timeout=children.SECONDS)
    assert child.returncode == NO_DEVICE
    assert "it has another layout: remove it" in output


def test_nvidia_smi_answers_the_queries_of_sg_rlhf() -> None:
    from sg_rlhf.doctor import check, preflight
    from sg_rlhf.machine import names

    machine = Machine(SOFTWARE_GPU_COUNT="2")
    try:
        assert machine.nvidia_smi("-L").startswith("GPU 0: Software GPU (H100 80GB HBM3) (UUID: ")
        query = ("--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits")
        assert machine.nvidia_smi(*query) == "80998, 9.0\n80998, 9.0\n"
        assert names.size_of(80998) == 80
        assert "Driver Version: 580.95.05    CUDA Version: 13.0" in machine.nvidia_smi()
        assert preflight.driver("580.95.05", "13.0").status == check.OK
    finally:
        machine.close()


def call_what_is_not_written() -> None:
    library = ctypes.CDLL("libcudart.so.13")
    for _ in range(2):
        assert library.cudaMallocAsync(None, 0, None) == NOT_SUPPORTED
        assert library.cublasSgemm_v2() == 0


def test_functions_without_an_implementation_are_reported_once(machine: Machine) -> None:
    lines = machine.run(call_what_is_not_written, SOFTWARE_GPU_TRACE="1").splitlines()
    assert len(lines) == 2
    assert "cudaMallocAsync is not implemented: it returns error 801" in lines[0]
    assert "cublasSgemm_v2 does nothing" in lines[1]


def test_an_environment_without_the_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    program = children.ROOT / "tests/software_gpu/device/build.py"
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no software_gpu.json" in done.stderr


if __name__ == "__main__":
    children.main(globals())
