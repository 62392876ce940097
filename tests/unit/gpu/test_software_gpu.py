"""The command of the software GPU, and what keeps its results apart from a GPU's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import launch, run
from tests.software_gpu.cases import CASES, chosen

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_case() -> None:
    page = (ROOT / "tests" / "software_gpu" / "README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for case in CASES:
        assert any(row.startswith(f"| {case.name} | {case.devices} |") for row in rows), case.name
        assert importlib.util.find_spec(case.module), case.name


def test_the_short_cases_need_no_second_pipeline() -> None:
    assert [case.name for case in chosen([], short=True)] == ["imports", "device", "pipeline"]
    assert chosen([], short=False) == list(CASES)


def test_an_unknown_case_is_one_line() -> None:
    """Before anything is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.software_gpu", "three"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("software GPU: case 'three': expected one of imports, device,")
    assert done.stderr.count("\n") == 1


def test_its_results_are_none_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/gpu.sh on such a device, without another --out."""
    device = {"name": "Software GPU (H100 80GB HBM3)", "memory_gib": 4.0, "capability": "9.0"}
    monkeypatch.setattr(launch, "probe", lambda: {"why": None, "gpu": device})
    assert run.main(["a"]) == 2
    assert "--out" in capsys.readouterr().err
    assert not launch.is_software({"name": "NVIDIA H100 80GB HBM3"})
