"""What a run predicted, beside what it measured and left on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sg_rlhf.common import run_log
from sg_rlhf.common.final_checkpoint import final_checkpoint
from sg_rlhf.config import load_config
from sg_rlhf.plan import host_memory
from sg_rlhf.plan.of_recipe import PREDICTED
from sg_rlhf.plan.run_shape import run_shape

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def test_predicted_beside_measured(trained: Path) -> None:
    predicted = json.loads((trained / PREDICTED).read_text())
    assert predicted["fits"] and predicted["time"] is None and predicted["rollouts"] == 4
    for row in run_log.read(trained / run_log.METRICS):
        of_one_process = row["memory/peak_rss_gib"]
        assert 0.2 < of_one_process < predicted["host_memory_gib"]


def test_folders_take_what_the_plan_says(trained: Path) -> None:
    """ZeRO-3 on one rank: 12 bytes a parameter to resume, 2 to evaluate; metadata beside them."""
    run = run_shape(load_config(trained / "config.yaml"))
    assert run is not None
    actor = trained / "checkpoints" / "deepspeed" / "_actor"
    states = actor / (actor / "latest").read_text().strip()
    for folder, planned in (
        (states, host_memory.deepspeed_folder(run)),
        (final_checkpoint(trained), host_memory.hugging_face_folder(run)),
    ):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert planned <= size <= planned + 100_000
        assert size == pytest.approx(planned, rel=0.05)
