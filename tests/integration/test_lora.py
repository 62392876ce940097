"""LoRA under ZeRO-3: the frozen parameters of the base model are partitioned again after each use.

DeepSpeed 0.19.3 to 0.19.7 left them gathered after a recomputation, each rank the whole model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_no_frozen_parameter_stays_gathered(tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("lora_on_ranks.py", 2, str(out))
    found = torch.load(out, weights_only=True)
    assert len(found) == 3
    for case, moments in found.items():
        assert moments == {"backward": [], "step": []}, case
