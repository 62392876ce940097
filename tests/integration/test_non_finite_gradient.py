"""A backward pass that gives NaN stops a run before DeepSpeed's optimizer puts it into weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sg_rlhf.overlay import jit_builds
from tests.integration.conftest import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_every_rank_stops_with_the_weights_of_the_step_before(stage: int, tmp_path: Path) -> None:
    """They also start over the lock of a build that was killed: torch alone waits forever."""
    build = jit_builds.folder() / "fused_adam"
    build.mkdir(parents=True, exist_ok=True)
    (build / "lock").touch()
    out = tmp_path / "found.pt"
    run_ranks("non_finite_gradient.py", 2, str(stage), str(out))
    found = torch.load(out, weights_only=True)
    assert found["trained"]
    assert found["unharmed"]
    for message in found["stopped"]:
        assert message is not None and "optimizer step 2: nothing was trained on it" in message
