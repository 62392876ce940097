"""Engines that stopped answering: a run would wait for them without end and without a word.

A thread of the controller asks every engine for a sign of life, of its own process and of the one
where the model runs. Where one is silent for too long, or says all the time that its core is dead
while nobody replaces it, the thread ends it: whoever waits for it hears so, and Ray starts another
(:mod:`.engines`). The controller itself may be waiting in any of upstream's calls, none of which
has a deadline. So where no other may take the engine's place, or the next one is silent too, the
thread leaves a line in the run directory and ends the controller, and with it the run; the driver
tells the line.
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

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.rollout.engine_pool import START_TIMEOUT, EnginePool

FILE = Path("logs") / "lost_engine.txt"
#: How often an engine is asked; a fraction of a shorter limit.
INTERVAL_SECONDS = 5.0


@contextlib.contextmanager
def monitor(engines: EnginePool | None, seconds: float, run_dir: Path | None) -> Iterator[None]:
    """Watch the engines meanwhile.

    Args:
        engines: of the run.
        seconds: of silence that end an engine, and the run where no other may take its place; 0
            for no watch.
        run_dir: where the line goes; without one there is no watch.
    """
    if not seconds or run_dir is None or engines is None or not engines.handles:
        yield
        return
    (run_dir / FILE).unlink(missing_ok=True)
    ended = threading.Event()
    thread = threading.Thread(
        target=_monitor_forever,
        args=(engines, seconds, run_dir, ended),
        name="engine watch",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def failure_message(run_dir: str | Path | None) -> str | None:
    """The line of a run that was ended for an engine's silence; None if it was not."""
    file = Path(run_dir) / FILE if run_dir else None
    return file.read_text().strip() if file is not None and file.is_file() else None


def _monitor_forever(
    engines: EnginePool, seconds: float, run_dir: Path, ended: threading.Event
) -> None:
    """Watch, and begin anew after an error of the watch itself."""
    while not ended.is_set():
        try:
            _watch(engines, seconds, run_dir, ended)
        except Exception as error:
            print(f"the watch of the rollout engines begins anew: {error_report.summarize(error)}")
            ended.wait(min(INTERVAL_SECONDS, seconds / 4))


def _watch(engines: EnginePool, seconds: float, run_dir: Path, ended: threading.Event) -> None:
    #: Until when each may be silent.
    patience = dict.fromkeys(range(len(engines.handles)), time.monotonic() + seconds)
    asked: dict[int, Any] = {}
    ended_here: set[int] = set()
    dead: set[int] = set()
    while not ended.wait(min(INTERVAL_SECONDS, seconds / 4)):
        for number in patience:
            if number not in asked:
                asked[number] = engines.handles[number].alive.remote()
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
        for number in [n for n, reference in asked.items() if reference in answered]:
            reference = asked.pop(number)
            try:
                ray.get(reference)
            except ray.exceptions.RayError:
                # Whoever waits for it hears so too and replaces it; this may take a while, once.
                if number not in dead:
                    dead.add(number)
                    patience[number] = time.monotonic() + seconds + START_TIMEOUT
            else:
                patience[number] = time.monotonic() + seconds
                ended_here.discard(number)
                dead.discard(number)
        silent = [n for n, until in patience.items() if time.monotonic() > until]
        if not silent or ended.is_set():
            continue
        if any(n in ended_here or not engines.may_replace(n) for n in silent):
            _abort_run(silent, seconds, run_dir)
        for number in silent:
            print(f"rollout engine {number} is silent for {seconds:g} s: ended", flush=True)
            ended_here.add(number)
            patience[number] = time.monotonic() + START_TIMEOUT
            engines.end(number)


def _abort_run(silent: Sequence[int], seconds: float, run_dir: Path) -> None:
    names = f"engine{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    line = (
        f"rollout {names} gave no sign of life for {seconds:g} s (sg.engine_timeout): stopped, "
        "hung, or cut off from the controller"
    )
    print(line, flush=True)
    with contextlib.suppress(OSError):
        write_whole(run_dir / FILE, line + "\n")
    os._exit(1)
