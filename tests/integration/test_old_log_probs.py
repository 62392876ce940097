"""Two ZeRO-3 ranks: without a pass for old log-probs the update is upstream's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("rows", "epochs"),
    [
        ("packed", 1),
        pytest.param("packed", 2, marks=pytest.mark.full),
        pytest.param("padded", 1, marks=pytest.mark.full),
    ],
)
def test_the_update_is_upstreams(tmp_path: Path, rows: str, epochs: int) -> None:
    found = {}
    for way in ("pass", "skipped"):
        out = tmp_path / f"{way}.pt"
        run_ranks("old_log_probs_on_ranks.py", 2, way, rows, str(epochs), str(out))
        found[way] = torch.load(out, weights_only=True)
    old, new = found["pass"], found["skipped"]
    assert len(new["rows"]) == 4 * epochs
    assert new["rows"] == old["rows"]
    assert torch.equal(new["after"], old["after"])
    assert not torch.equal(new["after"], new["before"])
    # The second optimizer step is off the policy that sampled.
    assert new["rows"][0]["ppo_kl"] == 0 and new["rows"][1]["ppo_kl"] != 0
