"""A run directory has one owner, told from a dead one by its lock or its heartbeat."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from sg_rlhf.run_dir import lock
from sg_rlhf.run_dir.lock import LOCK, OWNER, RunLocked, hold_lock

HOLD = """
import sys, time
from pathlib import Path
from sg_rlhf.run_dir.lock import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_one_is_told_who_holds_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(RunLocked) as refused, hold_lock(tmp_path):
        pass
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"--run-dir {tmp_path}: held by process {holder.pid} on ")
    assert str(tmp_path) in json.loads((tmp_path / OWNER).read_text())["command"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_one_holds_nothing(
    tmp_path: Path, holder: subprocess.Popen[str], number: int
) -> None:
    holder.send_signal(number)
    holder.wait()
    assert (tmp_path / OWNER).is_file()
    with hold_lock(tmp_path, say=pytest.fail):  # which would be said before it waits
        assert json.loads((tmp_path / OWNER).read_text())["process"] != holder.pid
    assert not (tmp_path / OWNER).exists()


def test_it_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold_lock(tmp_path):
        raise KeyError
    with hold_lock(tmp_path):
        pass


def test_another_machine_that_goes_on_beating_holds_it(tmp_path: Path) -> None:
    """Its lock is not seen from here."""
    file = tmp_path / OWNER
    row = {"host": "elsewhere", "process": 7, "since": "2026-01-01T00:00:00Z", "command": "train"}
    file.write_text(json.dumps(row))
    ended, said = threading.Event(), []

    def beat() -> None:
        count = 0
        while not ended.wait(0.1):
            count += 1
            file.write_text(json.dumps(row | {"beat": count}))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(RunLocked, match="held by process 7 on elsewhere since 2026-01-01"),
            hold_lock(tmp_path, said.append, beat_seconds=60.0),  # it looks each second
        ):
            pass
    finally:
        ended.set()
        thread.join()
    assert len(said) == 1 and "a run on elsewhere did not record its end" in said[0]


@pytest.mark.parametrize("removed", [False, True])
def test_another_machine_that_died_or_ended_does_not(tmp_path: Path, removed: bool) -> None:
    file = tmp_path / OWNER
    file.write_text(json.dumps({"host": "elsewhere", "process": 7}))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if removed:
            file.unlink()

    started, beat = time.monotonic(), 3600.0 if removed else 0.5  # nobody waits for the former
    with hold_lock(tmp_path, say, beat_seconds=beat):
        assert json.loads(file.read_text())["host"] != "elsewhere"
    assert len(said) == 1
    assert removed or time.monotonic() - started >= lock.PATIENCE * beat


def test_without_locks_the_file_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError("no locks on this file system")

    with hold_lock(tmp_path, beat_seconds=0.1):
        monkeypatch.setattr(FileLock, "acquire", refuse)
        with (
            pytest.raises(RunLocked, match="held by process"),
            hold_lock(tmp_path, lambda _: None, beat_seconds=60.0),
        ):
            pass


def test_it_beats(tmp_path: Path) -> None:
    deadline = time.monotonic() + 300
    with hold_lock(tmp_path, beat_seconds=0.05):
        while json.loads((tmp_path / OWNER).read_text())["beat"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (tmp_path / LOCK).exists()
