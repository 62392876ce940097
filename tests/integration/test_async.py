"""Asynchronous runs: what a bound of 0 is, what a kill leaves, whose weights sampled a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sg_rlhf.run_dir import jsonl_log
from tests.faults.kill_matrix import KilledRun, differences
from tests.integration.conftest import Data

pytestmark = [pytest.mark.integration, pytest.mark.full]

ASYNC = ("train.async_enable=true", "sg.correction=tis", "eval.steps=-1")
#: What a synchronous run has no reason to log.
OWN = ("async/", "weight_versions")


def finished(folder: Path, data: Data, *more: str) -> Path:
    run = KilledRun(folder, data, epochs=2, more=more)
    assert run.finish() == 0, run.line()
    return folder


def killed_after(rollouts: int, run: KilledRun) -> None:
    """Kill everything while the rollout after the next checkpoint is trained; then go on."""
    run.start()
    _wait_until(lambda: len(jsonl_log.read(run.folder / jsonl_log.METRICS)) >= rollouts)
    assert run.kill("everything", "updating", 0.0) is not None
    done = len(jsonl_log.read(run.folder / jsonl_log.METRICS))
    run.start()
    assert run.finish() == 0, run.line()
    rows = jsonl_log.read(run.folder / jsonl_log.METRICS)
    assert rollouts <= done < len(rows)
    assert [row["global_step"] for row in rows] == list(range(1, len(rows) + 1))


def _wait_until(is_so: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_bound_of_0_is_the_synchronous_run_byte_for_byte(tmp_path: Path, data: Data) -> None:
    synchronous = finished(tmp_path / "sync", data, "sg.correction=tis", "eval.steps=-1")
    bound_0 = finished(tmp_path / "bound_0", data, *ASYNC, "sg.max_staleness=0")
    assert len(jsonl_log.read(bound_0 / jsonl_log.METRICS)) == 4, "two epochs of two rollouts"
    assert not differences(synchronous, bound_0, OWN)


def test_a_killed_run_ends_as_one_that_never_was(tmp_path: Path, data: Data) -> None:
    """Its buffer holds responses of older weights, which no engine could give again."""
    ahead = (*ASYNC, "sg.max_staleness=2", "train.async_queue_size=2")
    whole = finished(tmp_path / "whole", data, *ahead)
    rows = jsonl_log.read(whole / jsonl_log.METRICS)
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 2, 2]
    run = KilledRun(tmp_path / "killed", data, epochs=2, more=ahead)
    killed_after(2, run)
    assert not differences(whole, run.folder)


def test_partial_rollouts_have_a_version_for_every_token(tmp_path: Path, data: Data) -> None:
    """Nor is any token older than the bound, before a kill and after it."""
    partial = (
        *ASYNC, "train.partial_rollout_enable=true", "sg.max_staleness=2",
        "train.async_queue_size=2", "rollout.max_new_tokens=200", "rollout.temperature=1.5",
        "data.max_samples=16",
    )  # fmt: skip
    run = KilledRun(tmp_path / "partial", data, epochs=3, more=partial)
    killed_after(3, run)
    samples = jsonl_log.read(run.folder / jsonl_log.SAMPLES)
    for sample in samples:
        starts, versions = zip(*sample["weight_versions"], strict=True)
        assert starts[0] == 0 and all(a < b for a, b in pairwise(starts))
        assert starts[-1] < len(sample["tokens"])
        assert all(a < b for a, b in pairwise(versions))
        trained_by = sample["global_step"] - 1
        assert trained_by - 2 <= versions[0] and versions[-1] <= trained_by
    for row in jsonl_log.read(run.folder / jsonl_log.METRICS):
        shares = [row[f"async/staleness_share_{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1.0)


def test_an_engine_that_dies_while_it_samples_ahead_is_replaced(tmp_path: Path, data: Data) -> None:
    run = KilledRun(tmp_path / "run", data, epochs=3, more=ASYNC)
    run.start()
    _wait_until(lambda: len(jsonl_log.read(run.folder / jsonl_log.METRICS)) >= 2)
    kill = run.kill("engine's core", "updating", 0.0)
    assert kill is not None and not kill.ended
    assert run.finish() == 0, run.line()
    rows = jsonl_log.read(run.folder / jsonl_log.METRICS)
    assert [row["global_step"] for row in rows] == list(range(1, 7))
    assert sum(row["engines/replaced"] for row in rows) == 1
    assert all(row["async/staleness_max"] <= 1 for row in rows)


def test_samples_ahead_are_not_forgotten_by_a_synchronous_start(tmp_path: Path, data: Data) -> None:
    run = KilledRun(tmp_path / "run", data, epochs=3, more=ASYNC)
    run.start()
    _wait_until(lambda: len(jsonl_log.read(run.folder / jsonl_log.METRICS)) >= 2)
    assert run.kill("everything", "updating", 0.0) is not None
    rows = jsonl_log.read(run.folder / jsonl_log.METRICS)
    synchronous = KilledRun(run.folder, data, epochs=3, more=(*ASYNC, "train.async_enable=false"))
    assert synchronous.finish() != 0
    assert "train.async_enable" in synchronous.line()
    assert jsonl_log.read(run.folder / jsonl_log.METRICS) == rows
    run.start()
    assert run.finish() == 0, run.line()
