"""A run that is killed and started again ends as one that was not: byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import kill_matrix
from tests.integration.conftest import Data

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_the_end_is_the_same(tmp_path: Path, data: Data) -> None:
    """One of the kills of ``make faults``."""
    pairs = [("everything", "updating")]
    kills, differences = kill_matrix.run_matrix(tmp_path, data, pairs, seed=1, epochs=2)
    # A kill that met another part than planned is tried again.
    assert {(kill.process, kill.ended) for kill in kills} == {("everything", True)}
    assert not differences
