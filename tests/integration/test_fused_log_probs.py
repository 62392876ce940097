"""Training without logits on two ZeRO-3 ranks: the parameters of training with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("rows", ["packed", pytest.param("padded", marks=pytest.mark.full)])
def test_four_steps_on_two_ranks(tmp_path: Path, rows: str) -> None:
    found = {}
    for way in ("fused", "logits"):
        run_ranks("fused_on_ranks.py", 2, way, rows, str(tmp_path / way))
        found[way] = torch.load(tmp_path / way, weights_only=True)
    ours, theirs = found["fused"], found["logits"]
    assert torch.equal(ours["before"], theirs["before"])
    learned = (theirs["after"] - theirs["before"]).norm()
    assert learned > 0
    # Float32's rounding, four Adam steps later.
    assert (ours["after"] - theirs["after"]).norm() < 1e-3 * learned
    assert len(ours["rows"]) == len(theirs["rows"]) == 4
    for mine, expected in zip(ours["rows"], theirs["rows"], strict=True):
        for key in ("actor_grad_norm", "policy_loss", "kl", "entropy_loss", "sg/weight_mean"):
            assert mine[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
