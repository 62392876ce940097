"""What a user sees when a process of a run is killed or hangs: one line, and nothing left behind.

Each test starts the tiny recipe, harms one of its processes in the middle of a rollout, and reads
what the terminal got. The run stops with status 1 and can be continued from its last checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sg_rlhf.common import run_log
from sg_rlhf.overlay import failure, phases
from tests.integration.conftest import ROOT, Data, command, data, environment, is_alive

__all__ = ["data"]  # the fixture

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]


@dataclass
class Run:
    """A run that has made its first rollout and a checkpoint of it."""

    folder: Path
    process: subprocess.Popen[str]
    children: set[int] = field(default_factory=set)

    def worker(self, role: str) -> int:
        """The process of a worker, by what it calls itself or by its title."""
        for row in run_log.read(self.folder / "logs" / phases.FILE):
            if row["who"] == role:
                return int(row["pid"])
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if role in " ".join(process.cmdline()):
                return process.pid
        raise LookupError(role)

    def end(self) -> tuple[int, list[str], float]:
        """Its status, the lines of its output, and how long it took from now."""
        started = time.monotonic()
        output = self.process.communicate(timeout=200)[0]
        lines = [line for line in re.split(r"[\r\n]+", output) if line.strip()]
        return self.process.returncode, lines, time.monotonic() - started


@pytest.fixture
def run(tmp_path: Path, data: Data, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Where its parameter is False, with workers that are started one by one, by their titles."""
    folder = tmp_path / "run"
    forked = {} if getattr(request, "param", True) else {"SG_FORK_SERVER": "0"}
    process = subprocess.Popen(
        command(
            folder, data, "ckpt.save_steps=1", "sg.eval_at_start=false", "sg.engine_timeout=15",
            "eval.steps=-1", "train.num_episodes=30",
        ),
        cwd=ROOT, env={**environment(), **forked}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    found = Run(folder, process)
    latest = folder / "checkpoints" / "deepspeed" / "_actor" / "latest"
    deadline = time.monotonic() + 300
    while not latest.is_file() or len(run_log.read(folder / run_log.METRICS)) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found.children = {c.pid for c in psutil.Process(process.pid).children(recursive=True)}
    yield found
    if process.poll() is None:
        process.kill()
        process.communicate()
    for pid in found.children:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("run", "name", "role"),
    [
        (True, phases.ENGINE, "rollout engine"),
        (True, phases.TRAINER, "policy rank"),
        (True, phases.CONTROLLER, "controller"),
        (False, "ray::ReferenceModelActor", "reference rank"),
    ],
    indirect=["run"],
)
def test_a_killed_worker(run: Run, name: str, role: str) -> None:
    pid = run.worker(name)
    os.kill(pid, signal.SIGKILL)
    status, lines, seconds = run.end()
    assert status == 1
    assert lines[-1].startswith(f"failed: {role} (process {pid} on "), lines[-3:]
    assert (
        " died (killed, or crashed); the same command resumes from the last checkpoint, "
        in (lines[-1])
    )
    assert not any("Traceback" in line for line in lines)
    assert seconds < 60
    assert "Traceback" in (run.folder / failure.FILE).read_text()
    time.sleep(1)
    assert not [pid for pid in run.children if is_alive(pid)]


@pytest.mark.parametrize(
    ("run", "name"), [(True, phases.ENGINE), (False, "VLLM::EngineCore")], indirect=["run"]
)
def test_a_stopped_engine(run: Run, name: str) -> None:
    os.kill(run.worker(name), signal.SIGSTOP)
    status, lines, seconds = run.end()
    assert status == 1
    assert lines[-1].startswith("failed: rollout engine 0 gave no sign of life for 15 s "), lines
    assert "resumes from the last checkpoint, global_step" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert seconds < 90
    time.sleep(1)
    assert not [pid for pid in run.children if is_alive(pid)]
