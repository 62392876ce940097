"""A backward pass that gives NaN stops a run before DeepSpeed's optimizer puts it into weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.full) for s in (1, 2)), 3])
def test_every_rank_stops_with_the_weights_of_the_step_before(stage: int, tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("non_finite_gradient.py", 2, str(stage), str(out))
    found = torch.load(out, weights_only=True)
    assert found["trained"]
    assert found["unharmed"]
    for message in found["stopped"]:
        assert message is not None and "optimizer step 2: nothing was trained on it" in message
        # The backward pass of the last norm gave NaN to what is below it.
        assert "(model.embed_tokens.weight, model.layers.0." in message and " more)" in message


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(1, 2, marks=pytest.mark.full),
        pytest.param(2, 2, marks=pytest.mark.full),
        pytest.param(3, 1, marks=pytest.mark.full),
        (3, 2),
    ],
)
def test_a_skipped_step_changes_nothing_but_the_schedule(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    """NaN of one rank: all skip, and go on as if its rollout had never been, until the bound."""
    found = {}
    for how in ("nan", "without"):
        out = tmp_path / f"{how}.pt"
        run_ranks("skipped_steps.py", ranks, str(stage), how, str(out))
        found[how] = torch.load(out, weights_only=True)
    skipped, expected = found["nan"], found["without"]
    assert skipped["trained"] and skipped["kept"] == [True] * 3
    assert torch.equal(skipped["state"], expected["state"])
    assert bool(skipped["state"].isfinite().all())
    (step,), (other,) = skipped["applied"], expected["applied"]
    assert (step["optimizer_step"], other["optimizer_step"]) == (4, 2)
    assert {**step, "optimizer_step": 2} == other  # its learning rate among the rest
    assert skipped["steps"] == [0, 0] and all(map(math.isfinite, skipped["figures"]))
    assert skipped["same_schedule"]
    # 1 applied, 2 skipped, 1 applied, 3 skipped; 8 responses are 4 micro-batches of 2.
    assert skipped["counts"] == [7, 5, 7 * 4 // ranks]
    for rows in skipped["rows"]:  # the same on every rank
        (loss,), (gradient,) = rows
        assert (loss["cause"], loss["optimizer_step"]) == ("the policy loss", 2)
        assert loss["prompts"] == [ranks - 1] and "policy loss nan" in loss["message"]
        assert (gradient["cause"], gradient["in_a_row"]) == ("the gradient", 2)
        assert gradient["prompts"] == list(range(8))
    assert skipped["last"] == [(1, "the policy loss"), (2, "the gradient")]
    (message,) = {*skipped["stopped"]}
    assert "optimizer step 7: nothing was trained on it" in message
    assert "2 optimizer steps in a row were skipped before it (sg.max_nonfinite=2" in message
