"""What the checkpoint of a sleeping optimizer holds, and what is loaded of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration

STATE = ["exp_avg", "exp_avg_sq", "step"]
WITH_BUFFERS = sorted([*STATE, "exp_avg_offload_buffer", "exp_avg_sq_offload_buffer"])


def test_a_resumed_optimizer_has_its_moments_and_no_buffers_of_the_sleep(tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("resumed_optimizer.py", 1, str(tmp_path / "checkpoints"), str(out))
    found = torch.load(out, weights_only=True)
    assert found["kept"] == WITH_BUFFERS
    # On a GPU torch would load those two beside the parameter, and nothing put them back.
    assert found["loaded_by_upstream"] == WITH_BUFFERS
    assert found["loaded"] == STATE
    assert found["asleep_again"] == WITH_BUFFERS
    assert found["moved"] and found["equal"]
    # A buffer is the moment's own storage, which torch saves once.
    assert found["asleep"] <= found["bytes"] < 1.01 * found["asleep"]
