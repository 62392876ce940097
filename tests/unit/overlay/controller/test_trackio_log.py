"""A run in trackio: its numbers, its samples, and one run however often it is started."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sg_rlhf.overlay.controller.trackio_log import TrackioLogger

pytest.importorskip("trackio", reason="pip install '.[trackio]'")


def test_a_resumed_run_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    sample = {"prompt": "p", "response": "r", "reward": 1.0, "advantage": 0.5}
    for start in (0, 2):
        logger = TrackioLogger("tests", "run")
        for step in (start + 1, start + 2):
            metrics = {"reward": step / 8, "nothing": math.nan, "generated_samples": ["text", 1.0]}
            logger.log_train(step, metrics)
            logger.log_samples(step, [sample])
        logger.log_eval(step, {"accuracy": 0.5})
        logger.close()
    assert SQLiteStorage.get_runs("tests") == ["run"]
    rows = SQLiteStorage.get_logs("tests", "run")
    rewards = {row["step"]: row["train/reward"] for row in rows if "train/reward" in row}
    assert rewards == {1: 0.125, 2: 0.25, 3: 0.375, 4: 0.5}
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [0.5, 0.5]
    tables = [row["train/generated_samples"] for row in rows if "train/generated_samples" in row]
    assert len(tables) == 4 and "train/nothing" not in {name for row in rows for name in row}
