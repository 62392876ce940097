"""Lock of a run directory: a second run is refused and told which process holds it.

A file lock of the kernel ends with its process. On a file system of several machines it may work on
one machine only, or not at all. So the owner also rewrites a file every few seconds. A process on
another machine watches whether the file changes; this needs no synchronized clocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sg_rlhf.common.atomic_io import write_whole

LOCK, OWNER = ".owner.lock", "owner.json"
#: Seconds between two writes of the owner, and how many of them may be missing.
BEAT_SECONDS, PATIENCE = 5.0, 4


class RunLocked(RuntimeError):
    """Another run holds the directory."""


@contextlib.contextmanager
def hold_lock(
    run_dir: Path, say: Callable[[str], None] = print, beat_seconds: float = BEAT_SECONDS
) -> Iterator[None]:
    """Hold the lock of an existing run directory.

    Args:
        say: called with one line if this has to wait to see whether the last owner is alive.
        beat_seconds: seconds between two writes of the owner's file.

    Raises:
        RunLocked: one line with the process that holds it, and since when.
        OSError: nothing can be written there.
    """
    lock, file = FileLock(run_dir / LOCK), run_dir / OWNER
    locks = True
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunLocked(_is_held(run_dir)) from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        locks = False  # a file system without locks: the owner's file alone decides
    try:
        last = _read(file)
        # Between runs on one machine the lock alone decides.
        here = last is not None and locks and last.get("host") == socket.gethostname()
        if last is not None and not here and _last_beat(file, last, say, beat_seconds):
            raise RunLocked(_is_held(run_dir))
        beats = _Heartbeat(file, beat_seconds)
        try:
            yield
        finally:
            beats.stop()
    finally:
        lock.release()


class _Heartbeat:
    """Rewrites the owner's file until it is stopped, then removes it."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._row: dict[str, Any] = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(sys.argv),
            "beat": 0,
        }
        self._write()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._row, indent=1) + "\n")

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            self._row["beat"] += 1
            # A full disk must not end the run; the lock and the old file remain.
            with contextlib.suppress(OSError):
                self._write()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._file.unlink()


def _last_beat(
    file: Path, last: dict[str, Any], say: Callable[[str], None], beat_seconds: float
) -> bool:
    """Whether the owner still rewrites its file; watches for up to ``PATIENCE`` beats."""
    seconds = beat_seconds * PATIENCE
    say(
        f"{file.parent}: a run on {last.get('host')} did not record its end; "
        f"checking for {seconds:g} s whether it is alive"
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, beat_seconds / 2))
        # Opened again each time: a network file system may answer from its cache.
        now = _read(file)
        if now is None:  # it ended
            return False
        if now != last:
            return True
    return False


def _read(file: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def _is_held(run_dir: Path) -> str:
    row = _read(run_dir / OWNER) or {}
    who = (
        f"process {row.get('process')} on {row.get('host')} since {row.get('since')} "
        f"({row.get('command')})"
        if row
        else "another process"
    )
    return f"--run-dir {run_dir}: held by {who}; wait until it ends, stop it, or use another folder"
