"""docs/tutorials/3_first_domain.md to its end: a user's rows, reward, agent and domain train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from tests.unit.docs.page import TUTORIALS, follow


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tutorial_trains(tmp_path: Path) -> None:
    done = follow(tmp_path, training=True, page=TUTORIALS / "3_first_domain.md")
    assert done.returncode == 0, done.stderr
    (own,) = jsonl_log.read(tmp_path / "runs/mine" / jsonl_log.METRICS)
    assert own["has_box"] > 0 and 0 <= own["rollout/reward_mean"] <= 1.1
    (agent,) = jsonl_log.read(tmp_path / "runs/agent" / jsonl_log.METRICS)
    assert 1 <= agent["attempts"] <= 2
    assert agent["rollout/reward_mean"] == pytest.approx(agent["rollout/accuracy"])
    domain = jsonl_log.read(tmp_path / "runs/sums" / jsonl_log.METRICS)
    assert len(domain) == 2 and all(row["format_ok"] > 0 for row in domain)
    results = json.loads((tmp_path / "out/sums/results.json").read_text())
    assert results["benchmarks"]["sums"]["scores"]["accuracy"]["n_questions"] == 100
