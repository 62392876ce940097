"""Machines by name, as found, and the sizes that a recipe has."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pynvml
import pytest

from sg_rlhf.machine import gpus, hardware
from sg_rlhf.machine.facts import Disk, Facts, Gpu
from sg_rlhf.machine.gather import gather
from sg_rlhf.machine.gpus import detect
from sg_rlhf.machine.names import GPUS, gpu_of
from tests.unit.machine.fake_nvml import H100, install


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "kind"),
    [
        ("8x80gb", 1, 8, "h100"),
        ("1x24gb", 1, 1, "4090"),
        ("2x8x80gb", 2, 8, "h100"),
        ("4x40gb", 1, 4, "a100-40gb"),
        ("8xh100", 1, 8, "h100"),
        ("4xl40s", 1, 4, "l40s"),
        ("2x8xB200", 2, 8, "b200"),
        ("1xh100-pcie", 1, 1, "h100-pcie"),
    ],
)
def test_names(name: str, nodes: int, gpus: int, kind: str) -> None:
    found = hardware.named(name)
    assert (found.nodes, found.gpus_per_node, found.gpu) == (nodes, gpus, kind)
    assert found.gpus == nodes * gpus and found.gpu_memory_gib == GPUS[kind].usable_gib
    assert found.link == ("nvlink" if GPUS[kind].nvlink else "pcie")
    assert found.type.name in found.describe()


@pytest.mark.parametrize(
    ("device", "mib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA GeForce RTX 4090", 24564, "4090"),
        ("NVIDIA GeForce RTX 3090", 24576, "3090"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10G", 23028, "a10"),
        ("NVIDIA RTX A6000", 49140, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "6000ada"),
        ("Some Future GPU", 49140, "a100-40gb"),
        ("Some Future GPU", 98304, "h100"),
        ("Some Old GPU", 16384, "4090"),
    ],
)
def test_devices_as_nvidia_smi_names_them(device: str, mib: int, kind: str) -> None:
    assert gpu_of(device, mib / 1024)[0] == kind
    found = hardware.of_machine(Facts(gpus=[Gpu(device, mib)], host_memory_gib=64.0))
    assert found.gpu == kind
    # Of a device that is not in the table its own memory counts, not the type's.
    assert 0.95 * mib / 1024 <= found.gpu_memory_gib <= mib / 1024


def test_of_unequal_gpus_the_smallest_counts_and_none_is_the_cpu() -> None:
    two = [Gpu("NVIDIA H100 80GB HBM3", 81559), Gpu("NVIDIA GeForce RTX 4090", 24564)]
    found = hardware.of_machine(Facts(gpus=two, nvlink="all", host_memory_gib=64.0))
    assert (found.gpu, found.gpus_per_node, found.link) == ("4090", 2, "pcie")
    disk = Disk(holds=["run"], path="/", free_gb=5.0)
    cpu = hardware.of_machine(Facts(gpus=[], host_memory_gib=8.0, disks=[disk]))
    assert (cpu.gpus, cpu.host_memory_gib, cpu.disk_free_gb) == (0, 8.0, 5.0)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    found = hardware.of_machine(gather(tmp_path / "not" / "yet" / "there"))
    assert found.gpus == 0 and 0 < found.host_memory_gib < 1e5
    assert found.disk_free_gb is not None and found.disk_free_gb > 0
    install(monkeypatch, H100, H100)
    found = hardware.of_machine(gather(tmp_path))
    assert (found.gpu, found.gpus, found.link) == ("h100", 2, "nvlink")
    install(monkeypatch, H100, H100, linked=False)
    assert hardware.of_machine(gather(tmp_path)).link == "pcie"


def test_what_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("NVIDIA L4", 23034, 512, (8, 9)), cuda=12080)
    found = detect()
    assert found.gpus == [Gpu("NVIDIA L4", 23034, "8.9", 512)]
    assert (found.driver, found.driver_cuda, found.nvlink) == ("580.95.05", "12.8", None)


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H100)
    answer = threading.Event()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", answer.wait)
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.1)
    assert detect() == Facts(
        gpus=[], driver="none", gpu_problem="the driver did not answer within 0.1 s"
    )
    answer.set()
    assert len(detect().gpus) == 1


def test_without_a_driver_there_are_no_gpus_and_a_fault_is_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, fault=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert detect() == Facts(gpus=[], driver="none")
    install(monkeypatch, fault=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    found = detect()
    assert found.gpus == [] and "ersion mismatch" in str(found.gpu_problem)


def test_pairs_with_a_bridge_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    bridges = {(0, 1), (2, 3)}
    for visible, links in {"0,1,2,3": "some", "2,3": "all", "1,2": "none", "1": None}.items():
        install(monkeypatch, *[H100] * 4, linked=bridges)
        assert detect({"CUDA_VISIBLE_DEVICES": visible}).nvlink == links


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("-1,0", 0), ("1", 1), (" 1, -1,0", 1), ("0,1", 2), ("1,7,0", 1),
     ("3", 0), ("GPU-1a8f3c52", 1), ("GPU-0a8f,GPU-1a8f", 2)],
)  # fmt: skip
def test_gpus_that_are_hidden_from_cuda_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    install(monkeypatch, H100, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.of_machine(gather(tmp_path)).gpus == count


def test_a_process_gets_one_mig_slice_and_the_smallest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = [(f"{H100[0]} MIG {gb}gb", gb * 1000, 0, (9, 0)) for gb in (40, 20, 30)]
    install(monkeypatch, H100, slices=slices)
    found = hardware.of_machine(gather(tmp_path))
    assert found.gpus == 1 and found.gpu_memory_gib == pytest.approx(20_000 / 1024)


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, ["0", "1"]), ("-1", []), ("", []), ("0,-1,1", ["0"]), ("2, 5", ["2", "5"]),
     ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)  # fmt: skip
def test_devices_by_the_names_that_cuda_takes(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str]
) -> None:
    install(monkeypatch, H100, H100)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_devices() == found
