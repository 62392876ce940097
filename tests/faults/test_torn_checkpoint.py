"""A checkpoint that is no longer what was written: the one before it is used, or the run stops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sg_rlhf.overlay.checkpoints import paths
from sg_rlhf.run_dir import jsonl_log
from tests.integration.conftest import Data, data, train

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full]

QUIET = ["eval.dataset=null"]


def alter(checkpoint: Path) -> str:
    """One bit of the optimizer's states; returns the file's name."""
    (file,) = checkpoint.glob("*optim_states.pt")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    return file.name


def test_a_run_goes_on_from_the_one_before_it_and_stops_without_one(
    tmp_path: Path, data: Data
) -> None:
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints" / "deepspeed" / "_actor"
    first = train(folder, data, *QUIET, "train.num_episodes=1")
    assert first.returncode == 0, first.stdout + first.stderr
    assert paths.resume_candidates(checkpoints) == ["global_step2", "global_step1"]
    before = jsonl_log.read(folder / jsonl_log.METRICS)
    (checkpoints / ".global_step3.partial").mkdir()  # of a save that was killed

    name = alter(checkpoints / "global_step2")
    more = [*QUIET, "train.num_episodes=2", "--allow-changed", "train.num_episodes"]
    second = train(folder, data, *more)
    output = second.stdout + second.stderr
    assert second.returncode == 0, output
    said = (
        f"checkpoint {checkpoints / 'global_step2'}: {name} was altered (its SHA-256 "
        "differs); resuming from global_step1"
    )
    assert len([line for line in re.split(r"[\r\n]+", output) if said in line]) == 1, output
    after = jsonl_log.read(folder / jsonl_log.METRICS)
    assert [row["global_step"] for row in after] == [1, 2, 3, 4]
    # The rollout behind the one that is whole was made again.
    assert after[0] == before[0] and after[1]["time"] > before[1]["time"]
    assert not (checkpoints / ".global_step3.partial").exists()
    tags = paths.resume_candidates(checkpoints)
    assert tags[0] == "global_step4"

    for tag in tags:
        alter(checkpoints / tag)
    third = train(folder, data, *more)
    assert third.returncode == 1
    line = third.stderr.splitlines()[-1]
    named = f"{checkpoints / tags[0]}: {name} was altered"
    assert line.startswith(f"stopped: no checkpoint is intact: {named}")
    assert line.endswith("; restore one from a copy, or start in another --run-dir")
    assert [row["global_step"] for row in jsonl_log.read(folder / jsonl_log.METRICS)] == [
        1,
        2,
        3,
        4,
    ]
