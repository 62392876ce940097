"""The Dockerfile for machines without a GPU: its steps build, and what they build works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sg_rlhf
from tests.integration import image_build
from tests.integration.conftest import ROOT

pytestmark = pytest.mark.full


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    if reason := image_build.why_not():
        pytest.skip(reason)
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes


def test_the_cpu_image_builds_in_a_clean_root_and_works_there(work: Path) -> None:
    image = image_build.Image(ROOT / "docker" / "cpu.Dockerfile", work)
    generate = "data kk --out data/kk_tiny --generate people=2-3 per_size=20 test_per_size=4 seed=0"
    recipe = "configs/kk/grpo_sg_tiny_cpu.yaml"
    engines = "import deepspeed, openrlhf, ray, vllm; print('engines', vllm.__version__)"
    built = image.run(
        ["id"],
        [*image.entrypoint, "--version"],
        [*image.entrypoint, *generate.split()],
        [*image.entrypoint, "train", "--config", recipe, "--dry-run"],
        ["python", "-c", engines],
        timeout=1800,
    )
    print(built.stdout)
    assert built.returncode == 0
    assert "uid=1000(sg)" in built.stdout
    assert f"sg-rlhf {sg_rlhf.__version__}\n" in built.stdout
    assert "\n# the command that trains it\n" in built.stdout
    assert "\n# not " not in built.stdout  # everything is there that a run needs
    assert "\nengines 0." in built.stdout
    made = work / "upper" / "workspace" / "data" / "kk_tiny" / "train.jsonl"
    assert made.stat().st_uid == 1000
