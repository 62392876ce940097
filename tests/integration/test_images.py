"""The Dockerfile for machines without a GPU: its steps build, and what they build trains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import image_build
from tests.integration.conftest import ROOT, SMALL

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    if reason := image_build.why_not():
        pytest.skip(reason)
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes


def test_the_cpu_image_builds_in_a_clean_root_and_trains(work: Path) -> None:
    image = image_build.Image(ROOT / "docker" / "cpu.Dockerfile", work)
    generate = "data kk --out data/kk_tiny --generate people=2-3 per_size=20 test_per_size=4 seed=0"
    train = ["train", "--config", "configs/kk/grpo_sg_tiny_cpu.yaml", "--run-dir", "runs/first"]
    built = image.run(
        ["id"],
        [*image.entrypoint, "--version"],
        [*image.entrypoint, *generate.split()],
        [*image.entrypoint, *train, *SMALL],
        ["ls", "-l", "runs/first"],
        timeout=1100,
    )
    print(built.stdout)
    assert built.returncode == 0
    assert "uid=1000(sg)" in built.stdout
    assert "ready: .venv/bin/python" in built.stdout
    assert image.user == "1000:1000" and image.workdir == "/workspace"
    run = work / "upper" / "workspace" / "runs" / "first"
    assert (run / "metrics.jsonl").read_text().count("\n") == 2
    assert (run / "checkpoints" / "final" / "config.json").is_file()
    assert run.stat().st_uid == 1000
