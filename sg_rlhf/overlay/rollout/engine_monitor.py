"""Health checks of the rollout engines: from their start to the end of training.

- :func:`wait_for_start`: the driver, until colocated engines have started, to let them sleep.
- :class:`StartMonitor`: until training begins. The policy's first rank waits in the weight-sync
  rendezvous for every engine, so an engine that fails to start must end the run.
- :func:`monitor`: during training. The controller may be in a call of upstream's that has no
  deadline, so a silent engine is killed: its callers get an error, and Ray restarts it. Where no
  restart is allowed, the run ends.

A run that ends for its engines leaves a line in :data:`FILE`; the driver prints it.
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
from sg_rlhf.overlay.reporting.errors import EngineLost
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


# -- the start ---------------------------------------------------------------------------------


def wait_for_start(
    handles: Sequence[ActorHandle], seconds: float, stopped: threading.Event | None = None
) -> None:
    """Return when every engine has answered, or soon after ``stopped`` is set.

    Raises:
        EngineLost: an engine did not answer in time.
        RayError: an engine did not start; a note says which.
    """
    pending = {handle.ping.remote(): index for index, handle in enumerate(handles)}
    deadline = time.monotonic() + seconds
    while pending and not (stopped and stopped.is_set()):
        remaining = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(POLL_INTERVAL, remaining))
        for reference in ready:
            index = pending.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                error.add_note(f"rollout engine {index} did not start")
                if is_engine_failure(error) and (cause := core_error(handles[index])):
                    error.add_note(f"rollout engine {index} did not start: {cause}")
                raise
        if pending and time.monotonic() > deadline:
            raise EngineLost(
                f"rollout {engine_names(sorted(pending.values()))} did not start within "
                f"{seconds:g} s (six times sg.engine_timeout; logs/)"
            )


# -- health checks -----------------------------------------------------------------------------


class StartMonitor:
    """Ends the start of a run whose engines fail to start. Runs in a thread until stopped.

    The policy's first rank waits for every engine in the weight-sync rendezvous, and the driver
    waits for the rank. Killing the ranks ends both waits.

    Args:
        handles: the engines.
        ranks: of the policy.
        run_dir: for :data:`FILE`; None for none.
        timeout: seconds for all engines to answer.
    """

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        ranks: Sequence[ActorHandle],
        run_dir: Path | None,
        timeout: float,
    ) -> None:
        self._handles, self._ranks = handles, ranks
        self._run_dir, self._timeout = run_dir, timeout
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine start", daemon=True)
        if run_dir is not None:
            (run_dir / FILE).unlink(missing_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Training begins: :func:`monitor` watches the engines from now on."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            # Again and again: one may also die after its start, before the ranks have connected.
            while not self._stopped.is_set():
                wait_for_start(self._handles, self._timeout, self._stopped)
                self._stopped.wait(POLL_INTERVAL)
            return
        except EngineLost as error:
            line = str(error)
        except ray.exceptions.RayError as error:
            line = error_report.summarize(error)
            if ": " in (note := error.__notes__[-1]):
                line = note
            elif not line.startswith("rollout engine"):
                line = f"{note}: {line}"
        _leave_message(self._run_dir, line)
        for rank in self._ranks:
            ray.kill(rank)


@contextlib.contextmanager
def monitor(engines: EnginePool | None, seconds: float, run_dir: Path | None) -> Iterator[None]:
    """Ping the engines in a thread while the block runs.

    Args:
        engines: of the run.
        seconds: of silence after which an engine is killed, or the run ends if the engine may not
            be restarted; 0 for no monitor.
        run_dir: for :data:`FILE`; None for no monitor.
    """
    if not seconds or run_dir is None or engines is None or not engines.handles:
        yield
        return
    (run_dir / FILE).unlink(missing_ok=True)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_monitor_forever,
        args=(engines, seconds, run_dir, stopped),
        name="engine monitor",
        daemon=True,
    )
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


def _monitor_forever(
    engines: EnginePool, seconds: float, run_dir: Path, stopped: threading.Event
) -> None:
    """Monitor, and restart after an error of the monitor itself."""
    while not stopped.is_set():
        try:
            _monitor(engines, seconds, run_dir, stopped)
        except Exception as error:
            print(f"the health check of the engines was restarted: {error_report.summarize(error)}")
            stopped.wait(min(PING_INTERVAL, seconds / 4))


def _monitor(engines: EnginePool, seconds: float, run_dir: Path, stopped: threading.Event) -> None:
    #: When each engine's silence is too long.
    deadlines = dict.fromkeys(range(len(engines.handles)), time.monotonic() + seconds)
    pings: dict[int, ObjectRef] = {}
    killed: set[int] = set()
    dead: set[int] = set()
    while not stopped.wait(min(PING_INTERVAL, seconds / 4)):
        for index in deadlines:
            if index not in pings:
                pings[index] = engines.handles[index].ping.remote()
        answered, _ = ray.wait(list(pings.values()), num_returns=len(pings), timeout=0)
        for index in [i for i, reference in pings.items() if reference in answered]:
            reference = pings.pop(index)
            try:
                ray.get(reference)
            except ray.exceptions.RayError:
                # Its callers get the same error and restart it, which may take a while; once.
                if index not in dead:
                    dead.add(index)
                    deadlines[index] = time.monotonic() + seconds + START_TIMEOUT
            else:
                deadlines[index] = time.monotonic() + seconds
                killed.discard(index)
                dead.discard(index)
        silent = [i for i, deadline in deadlines.items() if time.monotonic() > deadline]
        if not silent or stopped.is_set():
            continue
        if any(i in killed or not engines.can_replace(i) for i in silent):
            _abort_run(silent, seconds, run_dir)
        for index in silent:
            print(f"rollout engine {index} gave no answer for {seconds:g} s: killed", flush=True)
            killed.add(index)
            deadlines[index] = time.monotonic() + START_TIMEOUT
            engines.terminate(index)


def _abort_run(silent: Sequence[int], seconds: float, run_dir: Path) -> None:
    _leave_message(
        run_dir,
        f"rollout {engine_names(silent)} did not answer for {seconds:g} s "
        "(sg.engine_timeout): stopped, hung, or disconnected from the controller",
    )
    os._exit(1)


def _leave_message(run_dir: Path | None, line: str) -> None:
    """For :func:`failure_message`, and for the log."""
    print(line, flush=True)
    if run_dir is not None:
        with contextlib.suppress(OSError):
            write_whole(run_dir / FILE, line + "\n")
