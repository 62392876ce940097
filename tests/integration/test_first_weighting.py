"""docs/tutorials/2_first_weighting.md to its end: a weighting from outside the package trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.docs.page import TUTORIALS, follow


@pytest.mark.full
def test_the_tutorial_trains(tmp_path: Path) -> None:
    done = follow(tmp_path, training=True, page=TUTORIALS / "2_first_weighting.md")
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/first/optimizer_steps.jsonl").read_text().splitlines()
    means = [json.loads(row)["sg/weight_mean"] for row in rows]
    # Two rollouts of two steps. Most tokens have p near 1, where w is 0.75.
    assert len(means) == 4 and all(0.75 < mean < 1.0 for mean in means)
