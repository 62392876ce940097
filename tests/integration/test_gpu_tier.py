"""Stages of the GPU tier that take DeepSpeed or the whole pipeline, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT, environment

pytestmark = [pytest.mark.integration, pytest.mark.full]


def result_of(stage: str, out: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        ["bash", "tests/gpu.sh", stage, "--device", "cpu", "--out", str(out), *arguments],
        cwd=ROOT, env={**environment(), "PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob(f"{stage}_*_cpu.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["status"] == "passed"
    return found


def test_zero3_on_one_rank(tmp_path: Path) -> None:
    found = result_of("c", tmp_path)
    # What the overlay mends: the frequencies came out of zero.Init in bfloat16.
    assert found["figures"]["rotary_frequencies_as_loaded"] == "torch.bfloat16"
    assert found["figures"]["the_step_after_resuming_is_bit_equal"] is True


def test_a_random_model_through_the_pipeline(tmp_path: Path) -> None:
    found = result_of("e", tmp_path)
    assert len(found["figures"]["sync_log_prob_diff_mean"]) == 1
    assert found["figures"]["seconds_step_total"] > 0
