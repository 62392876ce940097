"""Two ranks write a checkpoint, one's file is altered, and both load the one before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration

SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def on_two_ranks(tmp_path: Path, shared: bool) -> list[Any]:
    out = tmp_path / "found"
    run_ranks("torn_on_two_ranks.py", 2, str(tmp_path / "run"), str(int(shared)), str(out))
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]


def test_ranks_without_a_shared_folder_are_refused(tmp_path: Path) -> None:
    for error in on_two_ranks(tmp_path, shared=False):
        assert "_actor/global_step1: not every rank sees this folder: set ckpt.path to" in error


def test_ranks_agree_on_the_one_that_is_whole(tmp_path: Path) -> None:
    found = on_two_ranks(tmp_path, shared=True)
    assert found[0]["files"] == ["metric.json", SHARD.format(0), SHARD.format(1)]
    assert found[1]["files"] == found[0]["files"]
    assert found[0]["hidden"] == found[1]["hidden"] == []
    for of_rank, other in (found, found[::-1]):
        first, second, third = of_rank["chosen"]
        assert (first, second) == ("global_step2", "global_step1")
        assert third.startswith("no checkpoint is intact: ")
        assert f"{SHARD.format(1)} was altered" in third
        assert third.count(SHARD.format(1)) == other["chosen"][2].count(SHARD.format(1)) == 2
