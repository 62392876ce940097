"""Engines that stopped answering: a run would wait for them without end and without a word.

A thread of the controller asks every engine for a sign of life, of its own process and of the one
where the model runs. The controller itself may be waiting in any of upstream's calls, none of which
has a deadline. So where an engine is silent for too long the thread leaves a line in the run
directory and ends the controller, and with it the run; the driver tells the line.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from sg_rlhf.common.files import write_whole

FILE = Path("logs") / "lost_engine.txt"
#: How often an engine is asked; a fraction of a shorter limit.
INTERVAL_SECONDS = 5.0


@contextlib.contextmanager
def watching(engines: Sequence[Any], seconds: float, run_dir: Path | None) -> Iterator[None]:
    """Watch the engines meanwhile.

    Args:
        engines: Ray actors with a method ``alive``.
        seconds: of silence that end the run; 0 for no watch.
        run_dir: where the line goes; without one there is no watch.
    """
    if not seconds or run_dir is None or not engines:
        yield
        return
    (run_dir / FILE).unlink(missing_ok=True)
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(engines, seconds, run_dir, ended), name="engine watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def told(run_dir: str | Path | None) -> str | None:
    """The line of a run that was ended for an engine's silence; None if it was not."""
    file = Path(run_dir) / FILE if run_dir else None
    return file.read_text().strip() if file is not None and file.is_file() else None


def _watch(engines: Sequence[Any], seconds: float, run_dir: Path, ended: threading.Event) -> None:
    heard = dict.fromkeys(range(len(engines)), time.monotonic())
    asked: dict[int, Any] = {}
    while not ended.wait(min(INTERVAL_SECONDS, seconds / 4)):
        for number in heard:
            if number not in asked:
                asked[number] = engines[number].alive.remote()
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
        for number in [n for n, reference in asked.items() if reference in answered]:
            try:
                ray.get(asked.pop(number))
                heard[number] = time.monotonic()
            except ray.exceptions.RayError:  # dead: whoever waits for it hears so from Ray
                del heard[number]
        silent = [n for n, at in heard.items() if time.monotonic() - at > seconds]
        if silent and not ended.is_set():
            _end(silent, seconds, run_dir)


def _end(silent: Sequence[int], seconds: float, run_dir: Path) -> None:
    names = f"engine{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    line = (
        f"rollout {names} gave no sign of life for {seconds:g} s (sg.engine_timeout): stopped, "
        "hung, or cut off from the controller"
    )
    print(line, flush=True)
    with contextlib.suppress(OSError):
        write_whole(run_dir / FILE, line + "\n")
    os._exit(1)
