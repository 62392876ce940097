"""An optimizer step that leaves tensors as they were stops the run with their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration

FOUND = {"cut off": "no gradient comes back to model.layers.0.self_attn.v_proj.weight"}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_each_place_where_a_gradient_can_be_lost_is_named(stage: int, tmp_path: Path) -> None:
    """A step too small to move a bf16 number, or most float32 ones, is sane."""
    out = tmp_path / "found.pt"
    run_ranks("frozen_tensors.py", 2, str(stage), str(out))
    found = torch.load(out, weights_only=True)
    for fault, line in FOUND.items():
        assert found[fault].startswith("the first optimizer step did not train "), found
        assert line in found[fault], found
        assert "sg.check_trained=false" in found[fault]
    assert "did not train" not in found["none"], found
