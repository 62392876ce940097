"""The facts of this machine, and of machines that JSON describes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sg_rlhf.machine import gather as gathering
from sg_rlhf.machine.facts import Facts
from sg_rlhf.machine.gather import gather
from tests.unit.doctor.described import NAMES, described
from tests.unit.machine.fake_nvml import H100, install


def test_this_machine(tmp_path: Path) -> None:
    found = gather(tmp_path)
    assert Facts.model_validate_json(found.model_dump_json()) == found
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert found.host_memory_gib == pytest.approx(total, rel=0.02)
    assert found.cores is not None and 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.disks and sum(len(disk.holds) for disk in found.disks) == 2
    assert all(disk.free_gb > 0 for disk in found.disks)
    assert found.compiler != "none"


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, H100, H100)
    found = gather(tmp_path)
    assert [gpu.name for gpu in found.gpus] == [H100[0]] * 2
    assert (found.driver, found.driver_cuda, found.nvlink) == ("580.95.05", "13.0", "all")
    assert Facts.model_validate_json(found.model_dump_json()) == found


def test_a_file_system_counts_once(tmp_path: Path) -> None:
    places = {"run": tmp_path / "not" / "yet", "models": tmp_path, "other": Path("/dev/shm")}
    (ours, shm) = gathering.disks(places)
    assert (ours.holds, ours.path) == (["run", "models"], str(tmp_path))
    assert shm.holds == ["other"]


def test_what_a_run_directory_has_already(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "model").open("wb") as file:
        file.truncate(2_500_000_000)  # sparse
    assert gathering.size_gb(tmp_path) == 2.5
    assert gathering.size_gb(tmp_path / "none") == 0


def test_the_machines_that_are_described() -> None:
    for name in NAMES:
        found = described(name)
        assert found.memory_gib and found.disks
        assert Facts.model_validate_json(found.model_dump_json()) == found
