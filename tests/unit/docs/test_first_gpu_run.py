"""docs/gpu.md, as far as a machine without a GPU goes."""

from __future__ import annotations

import re

import pytest

from tests.gpu.stages import STAGES
from tests.unit.docs.page import ROOT, follow

PAGE = ROOT / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = follow(tmp_path_factory.mktemp("clone"), training=False, page=PAGE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_doctor_finds_the_described_machine_fine(printed: str) -> None:
    assert "8 x NVIDIA H100" in printed and "\nfine\n" in printed


def test_the_table_of_plans_is_as_printed(printed: str) -> None:
    rows = re.findall(
        r"^\| \d x 80 GB \| .* \| ([\d.]+) GiB \| (\d+) s \|$", PAGE.read_text(), re.M
    )
    assert len(rows) == 2
    for free, seconds in rows:
        assert f"{free} GiB of a GPU stay free" in printed
        assert f"time, an estimate: {seconds} s a rollout" in printed


def test_every_stage_is_skipped_and_named(printed: str) -> None:
    assert printed.count("skipped         no GPU") == len(STAGES)
    assert re.findall(r"^\| ([a-z]) \| ", PAGE.read_text(), re.M) == [stage.key for stage in STAGES]


def test_the_dry_run_names_the_command(printed: str) -> None:
    assert "sg-rlhf train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml" in printed
