"""Health checks of the rollout engines: from their start to the end of training.

The controller may be in a call without a deadline, so a silent engine is killed: its callers get an
error, and Ray restarts it. Where no restart is allowed, the controller ends and leaves a line in
:data:`FILE`, which the driver prints.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import EngineLost, reraise_run_error
from sg_rlhf.overlay.rollout.engine_pool import (
    POLL_INTERVAL,
    START_TIMEOUT,
    EnginePool,
    core_error,
    engine_names,
    is_engine_failure,
)

#: Seconds between two pings of an engine; a fraction of a shorter `sg.engine_timeout`.
PING_INTERVAL = 5.0
#: In the run directory: why the engines ended the run.
FILE = Path("logs") / "lost_engine.txt"


def wait_for_start(
    engines: Sequence[ActorHandle], seconds: float, loading: Sequence[ObjectRef] = ()
) -> None:
    """Return when every engine has answered and the ranks are loaded; raises EngineLost.

    The engines are pinged until all ranks have left the weight-sync rendezvous, where they wait for
    each engine.
    """
    left, pings = list(loading), {e.ping.remote(): i for i, e in enumerate(engines)}
    deadline = time.monotonic() + seconds
    while pings or left:
        ready, _ = ray.wait([*left, *pings], num_returns=1, timeout=POLL_INTERVAL)
        for reference in ready:
            index = pings.pop(reference, None)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                if index is None:
                    raise
                reraise_run_error(error)
                raise EngineLost(_start_failure(index, engines[index], error)) from error
            if index is None:
                left.remove(reference)
        if pings and time.monotonic() > deadline:
            raise EngineLost(
                f"rollout {engine_names(sorted(pings.values()))} did not start within "
                f"{seconds:g} s (six times sg.engine_timeout; logs/)"
            )
        if left and not pings:
            ray.wait(left, num_returns=len(left), timeout=POLL_INTERVAL)
            pings = {e.ping.remote(): i for i, e in enumerate(engines)}
            deadline = time.monotonic() + seconds


def _start_failure(index: int, engine: ActorHandle, error: Exception) -> str:
    line = (is_engine_failure(error) and core_error(engine)) or error_report.summarize(error)
    is_named = line.startswith("rollout engine")
    return line if is_named else f"rollout engine {index} did not start: {line}"


@contextlib.contextmanager
def monitor(engines: EnginePool, seconds: float, run_dir: Path | None) -> Iterator[None]:
    """Ping the engines in a thread; after ``seconds`` of silence kill one, or end the run.

    No monitor for 0 seconds, or without ``run_dir``, where :data:`FILE` is written.
    """
    if not seconds or run_dir is None:
        yield
        return
    (run_dir / FILE).unlink(missing_ok=True)
    stopped = threading.Event()
    arguments = (engines, seconds, run_dir, stopped)
    thread = threading.Thread(target=_monitor, args=arguments, name="engine monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def failure_message(run_dir: str | Path | None) -> str | None:
    """Why the engines ended a run; None if they did not."""
    file = Path(run_dir) / FILE if run_dir else None
    return file.read_text().strip() if file is not None and file.is_file() else None


def _monitor(engines: EnginePool, seconds: float, run_dir: Path, stopped: threading.Event) -> None:
    indices = range(len(engines.handles))
    answered = dict.fromkeys(indices, time.monotonic())
    # Seconds of silence; an engine that restarts has more.
    limits = dict.fromkeys(indices, seconds)
    pings: dict[int, ObjectRef] = {}
    while not stopped.wait(min(PING_INTERVAL, seconds / 4)):
        for index in indices:
            if index not in pings:
                pings[index] = engines.handles[index].ping.remote()
        ready, _ = ray.wait(list(pings.values()), num_returns=len(pings), timeout=0)
        for index in [i for i, reference in pings.items() if reference in ready]:
            try:
                ray.get(pings.pop(index))
            except ray.exceptions.RayError:  # its callers get the same error and restart it
                limits[index] = seconds + START_TIMEOUT
            else:
                answered[index], limits[index] = time.monotonic(), seconds
        silent = [i for i in indices if time.monotonic() - answered[i] > limits[i]]
        if stopped.is_set():
            return
        if any(limits[i] > seconds or not engines.can_replace(i) for i in silent):
            _abort_run(silent, seconds, run_dir)
        for index in silent:
            print(f"rollout engine {index} gave no answer for {seconds:g} s: killed", flush=True)
            limits[index] = seconds + START_TIMEOUT
            engines.terminate(index)


def _abort_run(silent: Sequence[int], seconds: float, run_dir: Path) -> None:
    line = (
        f"rollout {engine_names(silent)} did not answer for {seconds:g} s "
        "(sg.engine_timeout): stopped, hung, or disconnected from the controller"
    )
    print(line, flush=True)
    with contextlib.suppress(OSError):
        write_whole(run_dir / FILE, line + "\n")
    os._exit(1)
