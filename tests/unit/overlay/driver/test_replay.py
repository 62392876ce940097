"""What `sg-rlhf train --replay FILE` refuses, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sg_rlhf.config import load_config
from sg_rlhf.overlay.driver import replay
from sg_rlhf.overlay.driver.arguments import UsageError, upstream_arguments

RECIPE = Path(__file__).parents[4] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


def test_a_rollout_of_more_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    file = tmp_path / "step_1.pt"
    torch.save({"step": 1, "ranks": 2, "experiences": []}, file)
    args = upstream_arguments(load_config(RECIPE))
    with pytest.raises(UsageError, match="its run had 2 policy ranks and this recipe has 1"):
        replay.read(args, file)


def test_the_table_has_a_column_per_step_and_every_digit() -> None:
    rows = [{"kl": 0.1 + 0.2, "n": 3}, {"kl": 0.0, "n": 4}]
    lines = replay.format_table(rows).splitlines()
    assert [line.split() for line in lines] == [
        ["step", "1", "step", "2"], ["kl", "0.30000000000000004", "0.0"], ["n", "3", "4"],
    ]  # fmt: skip
