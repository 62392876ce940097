"""On two ranks, the reference's pass beside the update gives what it gave before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kill_matrix import differences
from tests.integration.conftest import Data, train

pytestmark = [pytest.mark.integration, pytest.mark.full]

TWO_RANKS = (
    "actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "vllm.num_engines=2",
    "sg.share_prompts=false", "rollout.micro_batch_size=4", "train.micro_batch_size=2",
    "sg.samples_per_step=16", "eval.dataset=null", "eval.steps=-1",
)  # fmt: skip
#: A sample may be left out before the update, so the reference has scored it by then.
BEFORE = "sg.on_nonfinite=skip"
#: What such a run alone logs.
OWN = ("nonfinite/",)


def test_when_the_reference_scores_changes_no_byte(tmp_path: Path, data: Data) -> None:
    beside, before = tmp_path / "beside", tmp_path / "before"
    for run_dir, more in ((beside, ()), (before, (BEFORE,))):
        done = train(run_dir, data, *TWO_RANKS, *more)
        assert done.returncode == 0, done.stderr
    assert not differences(beside, before, OWN)
