"""The error of a run inside Ray's errors."""

from __future__ import annotations

import pytest

from sg_rlhf.overlay.reporting.errors import EngineLost, reraise_run_error


def test_a_lost_engine_stays_one_for_the_driver() -> None:
    """After a SIGTERM to all processes it is a consequence of the signal, and not the cause."""
    outer = RuntimeError("of a task")
    outer.__cause__ = EngineLost("rollout engine 0 is lost")
    with pytest.raises(EngineLost, match="^rollout engine 0 is lost$"):
        reraise_run_error(outer)
