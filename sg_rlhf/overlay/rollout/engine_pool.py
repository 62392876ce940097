"""The rollout engines of a run: health checks, and restarts of lost engines.

Ray restarts an engine's process under the same handle, at most
:data:`sg_rlhf.overlay.rollout.engine.MAX_RESTARTS` times. A restarted engine has the model's
initial weights and no weight-sync group, so each start has its own id
(:class:`.dispatch.EngineInstance`) and :class:`EnginePool` rejoins it before it gets requests.

Who watches the engines:

- :func:`after_start`: the driver, until colocated engines have started.
- :class:`StartMonitor`: until training begins. The policy's first rank waits in the weight-sync
  rendezvous for every engine, so an engine that fails to start must end the run.
- :func:`monitor`: during training. The controller may be in a call of upstream's that has no
  deadline, so a silent engine is killed: its callers get an error, and Ray restarts it. Where no
  restart is allowed, the run ends.
- :meth:`EnginePool.check`: before each weight sync.

A run that ends for its engines leaves a line in :data:`FILE`; the driver prints it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.overlay.cluster import placement
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import EngineLost
from sg_rlhf.overlay.rollout.dispatch import EngineInstance, engine_names, is_engine_failure
from sg_rlhf.overlay.settings import worker_settings

#: Seconds for a restarted engine to load its model and compile.
START_TIMEOUT = 600.0
#: Seconds for Ray to find another node for an engine whose node was lost.
PLACEMENT_TIMEOUT = 20.0
#: Seconds between two checks while waiting for a restart.
POLL_INTERVAL = 2.0
#: Seconds for a worker that kills processes; it may have to be started first.
KILL_TIMEOUT = 120.0
#: Seconds between two pings of an engine; a fraction of a shorter `sg.engine_timeout`.
PING_INTERVAL = 5.0
#: In the run directory: why the engines ended the run.
FILE = Path("logs") / "lost_engine.txt"


@ray.remote(num_cpus=0, max_retries=0)
def _kill_processes(processes: Sequence[tuple[int, float]]) -> None:
    for pid, started in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == started:
                process.kill()


class EnginePool:
    """The engines of a run (:class:`sg_rlhf.overlay.rollout.dispatch.Engines`).

    Args:
        handles: Ray actors.
        max_restarts: per engine.
        rejoin: rebuilds the weight-sync group and sends the policy's weights to all engines.

    Attributes:
        trainer_lock: held by whoever calls the trainer's ranks; a restart does. Two threads that
            call them would reach the ranks in different orders.
        replaced: restarts per engine.
    """

    def __init__(
        self, handles: Sequence[Any], max_restarts: int, rejoin: Callable[[], None]
    ) -> None:
        self.handles = handles
        references = [handle.instance.remote() for handle in handles]
        self.instances: list[EngineInstance] = ray.get(references) if references else []
        self.trainer_lock = threading.Condition()
        self.replaced = [0] * len(handles)
        self._max_restarts, self._rejoin, self._reported = max_restarts, rejoin, 0

    def pop_replacement_count(self) -> int:
        """Number of restarts since the last call."""
        total = sum(self.replaced)
        new, self._reported = total - self._reported, total
        return new

    def check(self) -> None:
        """Restart engines that were lost while they had no request.

        Raises:
            EngineLost: as in :meth:`replace`.
        """
        with self.trainer_lock:
            self._replace(self._lost())

    def replace(self, index: int, lost: str) -> None:
        """Restart a lost engine and send it the policy's weights.

        Args:
            index: of the engine.
            lost: id of the lost instance. Does nothing if the engine was restarted since.

        Raises:
            EngineLost: it was lost more often than allowed, or does not restart.
        """
        with self.trainer_lock:
            if self.instances[index].name == lost:
                self._replace([index])

    def _replace(self, lost: list[int]) -> None:
        """Restart engines, and any that are lost meanwhile, then rejoin all of them at once."""
        if not lost:
            return
        while lost:
            for index in lost:
                self._restart(index)
            lost = self._lost()
        self._rejoin()

    def _lost(self) -> list[int]:
        """Engines that do not answer, or were restarted without this pool."""
        lost = []
        for index, handle in enumerate(self.handles):
            try:
                instance, _ = ray.get([handle.instance.remote(), handle.ping.remote()])
                if instance.name != self.instances[index].name:
                    lost.append(index)
            except ray.exceptions.RayError as error:
                if not is_engine_failure(error):
                    raise
                lost.append(index)
        return lost

    def _restart(self, index: int) -> None:
        if not self.can_replace(index):
            raise EngineLost(
                f"rollout engine {index} is lost (killed, crashed or hung), and was replaced "
                f"{self.replaced[index]} times before (sg.engine_restarts={self._max_restarts})"
            )
        self.replaced[index] += 1
        print(f"rollout engine {index} is lost: starting a replacement", flush=True)
        self.terminate(index)
        self.instances[index] = self._wait_until_restarted(index)

    def can_replace(self, index: int) -> bool:
        """Whether an engine may be restarted once more."""
        return self.replaced[index] < self._max_restarts

    def terminate(self, index: int) -> None:
        """Kill an engine's processes, whatever state they are in. Ray then restarts it.

        A process that is stopped by a signal would end neither itself nor its children.
        """
        lost = self.instances[index]
        on_its_node = NodeAffinitySchedulingStrategy(lost.node, soft=False)
        kill = _kill_processes.options(scheduling_strategy=on_its_node)
        with contextlib.suppress(ray.exceptions.RayError):  # the node was lost, too
            ray.get(kill.remote(lost.processes), timeout=KILL_TIMEOUT)

    def _wait_until_restarted(self, index: int) -> EngineInstance:
        handle, lost = self.handles[index], self.instances[index]
        deadline, unplaced_until = time.monotonic() + START_TIMEOUT, None
        reference = handle.instance.remote()
        while (now := time.monotonic()) < deadline:
            # A call to an engine without a placement waits, or fails at once.
            if _has_placement(lost):
                unplaced_until = None
            elif now > (unplaced_until := unplaced_until or now + PLACEMENT_TIMEOUT):
                raise EngineLost(_no_capacity_message(index, lost))
            ready, _ = ray.wait([reference], timeout=min(POLL_INTERVAL, deadline - now))
            if not ready:
                continue
            try:
                instance: EngineInstance = ray.get(reference)
            except ray.exceptions.ActorUnavailableError:
                instance = lost
            except ray.exceptions.RayActorError as error:
                raise EngineLost(
                    f"rollout engine {index} could not be restarted: "
                    f"{error_report.summarize(error)}"
                ) from None
            if instance.name != lost.name:
                return instance
            time.sleep(0.5)  # it is about to end
            reference = handle.instance.remote()
        raise EngineLost(
            f"rollout engine {index} was not restarted within {START_TIMEOUT:g} s (logs/)"
        )


def _has_placement(engine: EngineInstance) -> bool:
    """Whether an engine's placement group is whole, on this node or another.

    Ray reports a group as created again and again while it looks for another node, so the nodes are
    checked, too.
    """
    if engine.group is None:
        return True
    group = placement_group_table().get(engine.group, {})
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return group.get("state") == "CREATED" and {*group["bundles_to_node_id"].values()} <= alive


def _no_capacity_message(index: int, engine: EngineInstance) -> str:
    address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == engine.node), "")
    lacking = placement.missing_resources([placement.BUNDLE], placement.nodes())
    return (
        f"rollout engine {index} is lost with its machine {address}, and no other machine has "
        f"free resources for it: {lacking}"
    )


# -- the start ---------------------------------------------------------------------------------


def after_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``batch_vllm_engine_call``: before engines sleep, they have started.

    Upstream's driver calls ``sleep`` right after it has created colocated engines, and would wait
    for them without limit. Here ``sg.engine_start_timeout`` is the limit.
    """

    @functools.wraps(original)
    def call(engines: Sequence[Any], method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name == "sleep":
            _wait_for_start(engines, worker_settings.current().engine_start_timeout)
        return original(engines, method_name, *args, **kwargs)

    return call


def _wait_for_start(handles: Sequence[Any], seconds: float) -> None:
    pending = {handle.ping.remote(): index for index, handle in enumerate(handles)}
    deadline = time.monotonic() + seconds
    while pending:
        remaining = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
        if not ready:
            raise EngineLost(_late_message(pending.values(), seconds))
        for reference in ready:
            ray.get(reference)  # raises why an engine did not start
            del pending[reference]


def _late_message(engines: Iterable[int], seconds: float) -> str:
    return (
        f"rollout {engine_names(sorted(engines))} did not start within {seconds:g} s "
        "(sg.engine_start_timeout; logs/)"
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
        timeout: seconds for all engines to answer (``sg.engine_start_timeout``).
    """

    def __init__(
        self,
        handles: Sequence[Any],
        ranks: Sequence[Any],
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
        pending = {handle.ping.remote(): index for index, handle in enumerate(self._handles)}
        deadline = time.monotonic() + self._timeout
        while pending and not self._stopped.is_set():
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_INTERVAL)
            for reference in ready:
                index = pending.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    cause = error_report.summarize(error)
                    if not cause.startswith("rollout engine"):
                        cause = f"rollout engine {index} did not start: {cause}"
                    return self._abort(cause)
            if pending and time.monotonic() > deadline:
                return self._abort(_late_message(pending.values(), self._timeout))

    def _abort(self, line: str) -> None:
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
    pings: dict[int, Any] = {}
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
