"""SIGTERM: asked for once, waited for, and at last the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sg_rlhf.overlay.reporting import graceful_stop

WAITS = """
import sys, time
from pathlib import Path
from sg_rlhf.overlay.reporting import graceful_stop
try:
    with graceful_stop.GracefulStop(sys.argv[1] or None, float(sys.argv[2])):
        print("waits", flush=True)
        for _ in range(100_000):
            time.sleep(0.05)
            if graceful_stop.stop_requested(Path(sys.argv[1]) if sys.argv[1] else None):
                print("asked", flush=True)
                if sys.argv[3] == "heeds":
                    break
except graceful_stop.TerminatedNow as error:
    print(f"ended: {error}", flush=True)
"""


def waiting(folder: Path | str, seconds: float, heeds: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(folder), str(seconds), heeds],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process


def test_the_controller_is_asked_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / graceful_stop.STOP_FILE).touch()  # of a run that was killed
    process = waiting(tmp_path, 3600, "heeds")
    assert not graceful_stop.stop_requested(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "asked\n"
    assert not graceful_stop.stop_requested(tmp_path)


def test_it_ends_when_the_time_is_over(tmp_path: Path) -> None:
    process = waiting(tmp_path, 0.5, "not")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0].splitlines()
    assert said[-1] == "ended: no rollout ended within 0.5 s (sg.grace_seconds)"
    assert time.monotonic() - started > 0.4


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    process = waiting(tmp_path, 3600, "not")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0].splitlines()[-1] == "ended: at once"


def test_without_a_run_directory_at_once() -> None:
    process = waiting("", 60, "not")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "ended: at once\n"


def test_before_there_is_anything_to_save() -> None:
    with pytest.raises(KeyboardInterrupt, match="before the first rollout"):
        graceful_stop.interrupt(signal.SIGTERM, None)
