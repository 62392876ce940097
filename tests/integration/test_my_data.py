"""docs/my_data.md to its end: a user's rows, reward and agent train."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from tests.unit.docs.page import ROOT, follow


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tutorial_trains(tmp_path: Path) -> None:
    done = follow(tmp_path, training=True, page=ROOT / "docs" / "my_data.md")
    assert done.returncode == 0, done.stderr
    (own,) = jsonl_log.read(tmp_path / "runs/mine" / jsonl_log.METRICS)
    assert own["has_box"] > 0 and 0 <= own["rollout/reward_mean"] <= 1.1
    (agent,) = jsonl_log.read(tmp_path / "runs/agent" / jsonl_log.METRICS)
    assert 1 <= agent["attempts"] <= 2
    assert agent["rollout/reward_mean"] == pytest.approx(agent["correct"])
