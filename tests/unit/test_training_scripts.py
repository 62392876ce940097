"""What the training scripts take for the machine's hardware."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).parents[2] / "examples" / "scripts" / "common.sh"
GPU = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"
SLICES = [
    "  MIG 1g.10gb     Device  0: (UUID: MIG-0)",
    "  MIG 1g.10gb     Device  1: (UUID: MIG-1)",
]


@pytest.mark.parametrize(
    ("listed", "status", "hardware"),
    [
        ([], 127, "cpu"),
        (["No devices found."], 6, "cpu"),
        (["No devices found."], 0, "cpu"),
        ([GPU.format(0)], 0, "1xgpu"),
        ([GPU.format(0), *SLICES * 4], 0, "1xgpu"),
        ([GPU.format(i) for i in range(8)], 0, "8xh100"),
    ],
)
def test_gpus_are_counted_and_not_lines(
    tmp_path: Path, listed: list[str], status: int, hardware: str
) -> None:
    stub = tmp_path / "nvidia-smi"
    lines = "\n".join(listed)
    stub.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit {status}\n")
    stub.chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nsource '{COMMON}'\necho $hardware"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout.strip()) == (0, hardware), found.stderr
