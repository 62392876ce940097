"""A disk that is full in the middle of a run: one line, nothing torn, and then it goes on.

The run directory lies on a small file system of its own, and a file takes the rest of it away.
Where this machine lets nobody mount one, the test is skipped.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sg_rlhf.overlay.checkpoints import manifest, paths
from sg_rlhf.run_dir import jsonl_log
from tests.full_disk import fill, make_room, small_disk
from tests.integration.conftest import ROOT, Data, command, data, environment

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full]

#: Rollouts, and after how many of them there is a checkpoint.
ROLLOUTS, EVERY = 6, 2
#: Checkpoints that are kept.
KEPT = 2
#: Enough for rows and logs; a checkpoint of the tiny model takes 12 MB.
FOR_ROWS = 4 * 2**20
#: And too little for the final model, of 1.7 MB.
FOR_A_ROW = 300 * 2**10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 128) as folder:
        yield folder


class Run:
    """The tiny recipe on the small disk, started and started again."""

    def __init__(self, disk: Path, data: Data) -> None:
        self.folder = disk / "run"
        self.checkpoints = self.folder / "checkpoints" / "deepspeed" / "_actor"
        self._command = command(
            self.folder, data, f"ckpt.save_steps={EVERY}", f"train.num_episodes={ROLLOUTS // 2}",
            "sg.eval_at_start=false", "eval.steps=-1",
            f"ckpt.max_num={KEPT}", "ckpt.save_hf=true", "sg.wandb=auto",
        )  # fmt: skip

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            # It would not start a run for which the disk is that small.
            [*self._command, *overrides], cwd=ROOT, start_new_session=True, text=True,
            env={**environment(), "SG_SKIP_DOCTOR": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def start_and_await(self, tag: str, *overrides: str) -> subprocess.Popen[str]:
        """Until a checkpoint is whole, and its plain folder, and older ones are deleted."""
        process = self.start(*overrides)
        deadline = time.monotonic() + 1800
        plain = self.checkpoints.parent / f"{tag}_hf"
        while not (
            paths.latest_tag(self.checkpoints) == tag
            and plain.is_dir()
            and len(paths.resume_candidates(self.checkpoints)) <= KEPT
            and len([*plain.parent.glob("*_hf")]) <= KEPT
        ):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    def rows(self) -> list[int]:
        return [row["global_step"] for row in jsonl_log.read(self.folder / jsonl_log.METRICS)]

    def torn(self) -> list[str]:
        """What is not whole: leftovers, checkpoints that are altered, lines cut short."""
        found = [p.name for p in self.folder.rglob(".*") if p.name.endswith((".partial", ".tmp"))]
        for tag in paths.resume_candidates(self.checkpoints):
            files = manifest.read(self.checkpoints / tag)
            assert files is not None and any("optim_states" in name for name in files)
            wrong = manifest.first_mismatch(self.checkpoints / tag, files, files)
            found += [wrong] if wrong else []
        for file in self.folder.glob("*.jsonl"):
            text = file.read_text()
            found += [file.name] if text and not text.endswith("\n") else []
            assert len(jsonl_log.read(file)) == text.count("\n")
        return found


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    output = process.communicate(timeout=1800)[0]
    return process.returncode, [line for line in re.split(r"[\r\n]+", output) if line.strip()]


def test_it_goes_on_when_there_is_room_again(disk: Path, data: Data) -> None:
    run = Run(disk, data)
    # Room for rows, and none for the next checkpoint.
    process = run.start_and_await("global_step2")
    fill(disk, leave=FOR_ROWS)
    status, lines = ended(process)
    assert status == 1, lines
    named = run.checkpoints / "global_step4"
    assert lines[-1].startswith(
        f"failed: no space left on the disk of {named}; free some space "
    ), lines
    assert "; the same command resumes from the last checkpoint, global_step2; " in lines[-1]
    assert not [line for line in lines if "Traceback" in line or "Error" in line]
    assert run.torn() == [] and run.rows() == [1, 2, 3, 4]
    assert paths.resume_candidates(run.checkpoints) == ["global_step2"]

    # Room for nothing at all: the next rows do not fit.
    make_room(disk)
    process = run.start_and_await("global_step4")
    fill(disk)
    status, lines = ended(process)
    assert status == 1, lines
    named = rf"{run.folder}/(metrics|optimizer_steps|samples)\.jsonl"
    assert re.match(
        rf"failed: no space left on the disk of {named}; free some space ", lines[-1]
    ), lines
    assert "; the same command resumes from the last checkpoint, global_step4; " in lines[-1]
    assert not [line for line in lines if "Traceback" in line or "Error" in line]
    assert run.torn() == [] and run.rows()[:4] == [1, 2, 3, 4]

    # As long as it is full, it does not start.
    fill(disk)
    rows = run.rows()
    status, lines = ended(run.start())
    assert status == 2 and len(lines) < 4 and "No space left on device" in lines[-1], lines
    assert run.torn() == [] and run.rows() == rows

    # The final model does not fit, behind the last evaluation. That is long: the disk fills in it.
    make_room(disk)
    process = run.start_and_await("global_step6", "eval.n_samples_per_prompt=64")
    fill(disk, leave=FOR_A_ROW)
    status, lines = ended(process)
    assert status == 1, lines
    final = run.folder / "checkpoints" / "final"
    assert lines[-1].startswith(
        f"failed: no space left on the disk of {final}; free some space "
    ), lines
    assert run.torn() == [] and not final.exists()

    make_room(disk)
    status, lines = ended(run.start())
    assert status == 0, lines
    assert run.torn() == [] and run.rows() == list(range(1, ROLLOUTS + 1))
    assert paths.resume_candidates(run.checkpoints) == ["global_step6", "global_step4"]
    assert (final / "model.safetensors").is_file()
