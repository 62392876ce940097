"""Every process, in every part of a rollout: the ends are the same, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults import kill_matrix
from tests.integration.conftest import Data, data

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(6 * 3600)]


def test_whatever_is_killed_whenever_the_end_is_the_same(tmp_path: Path, data: Data) -> None:
    every = len(kill_matrix.PROCESSES) * len(kill_matrix.PARTS)
    pairs = kill_matrix.schedule(every, random.Random(0))
    kills, differences = kill_matrix.run_matrix(tmp_path, data, pairs, seed=0)
    print(kill_matrix.table(kills))
    assert {(kill.process, kill.met) for kill in kills} >= set(pairs)
    assert not differences
