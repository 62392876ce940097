"""The rollout engines of a run, and restarts of lost engines.

A loss is noticed by a failed request (:mod:`.dispatch`), before a weight sync
(:meth:`EnginePool.check`) and by the pings of :mod:`.engine_monitor`. Ray restarts the process
under the same handle, with the model's initial weights, so the pool sends it the policy's weights
before it gets requests. An engine that has never answered would die again: the run ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.overlay.cluster import placement
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import EngineLost, EngineReplaced, cause_chain

# Seconds
START_TIMEOUT = 600.0  # for a restarted engine to load its model and compile
PLACEMENT_TIMEOUT = 20.0  # for Ray to find another node for an engine whose node was lost
POLL_INTERVAL = 2.0  # between two checks while waiting for a restart
KILL_TIMEOUT = 120.0  # for a worker that kills processes; it may have to be started first
CORE_ERROR_TIMEOUT = 10.0  # for a lost engine to say what its core died of
#: Raised by vLLM when the process of its core has died (vllm.v1.engine.exceptions).
DEAD_CORE = "EngineDeadError"


class EngineInstance(NamedTuple):
    """One start of an engine; ``group`` is the id of its placement group, None without one."""

    name: str
    node: str
    processes: tuple[tuple[int, float], ...]
    group: str | None = None


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]  # Ray has no types
def _kill_processes(processes: Sequence[tuple[int, float]]) -> None:
    for pid, started in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == started:
                process.kill()


class EnginePool:
    """The engines of a run. Any of them may be restarted."""

    def __init__(
        self, handles: Sequence[ActorHandle], max_restarts: int, rejoin: Callable[[], None]
    ) -> None:
        self.handles = handles
        references = [handle.instance.remote() for handle in handles]
        self.instances: list[EngineInstance] = ray.get(references) if references else []
        self.trainer_lock = threading.Condition()
        self.replaced = [0] * len(handles)
        self.answered: set[int] = set()
        self._max_restarts, self._rejoin, self._reported = max_restarts, rejoin, 0

    def pop_replacement_count(self) -> int:
        """Number of restarts since the last call."""
        total = sum(self.replaced)
        new, self._reported = total - self._reported, total
        return new

    def check(self) -> None:
        """Restart engines that were lost while they had no request; raises as :meth:`replace`."""
        with self.trainer_lock:
            self._replace(self._lost())

    def replace(self, index: int, lost: str) -> None:
        """Restart a lost engine and send it the policy's weights; raises EngineLost."""
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
            times = (
                f"was replaced {self.replaced[index]} times before "
                f"(sg.engine_restarts={self._max_restarts})"
            )
            if index not in self.answered:
                times = "had not answered any request, so it is not replaced"
            cause = core_error(self.handles[index]) or "killed, crashed or hung"
            raise EngineLost(f"rollout engine {index} is lost ({cause}), and {times}")
        self.replaced[index] += 1
        print(f"rollout engine {index} is lost: starting a replacement", flush=True)
        self.terminate(index)
        self.instances[index] = self._wait_until_restarted(index)

    def can_replace(self, index: int) -> bool:
        """Whether an engine may be restarted once more."""
        return index in self.answered and self.replaced[index] < self._max_restarts

    def terminate(self, index: int) -> None:
        """Kill an engine's processes, also stopped ones. Ray then restarts it."""
        lost = self.instances[index]
        on_its_node = NodeAffinitySchedulingStrategy(lost.node, soft=False)
        kill = _kill_processes.options(scheduling_strategy=on_its_node)
        with contextlib.suppress(ray.exceptions.RayError):  # the node was lost, too
            ray.get(kill.remote(lost.processes), timeout=KILL_TIMEOUT)

    def _wait_until_restarted(self, index: int) -> EngineInstance:
        handle, lost = self.handles[index], self.instances[index]
        started = placed_at = time.monotonic()
        reference = handle.instance.remote()
        while (now := time.monotonic()) < started + START_TIMEOUT:
            # A call to an engine without a placement waits, or fails at once.
            if _has_placement(lost):
                placed_at = now
            elif now > placed_at + PLACEMENT_TIMEOUT:
                raise EngineLost(_no_capacity_message(index, lost))
            ready, _ = ray.wait([reference], timeout=POLL_INTERVAL)
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


def core_error(handle: ActorHandle) -> str:
    """What the core of an engine died of; empty if the engine does not know, or is gone, too."""
    with contextlib.suppress(ray.exceptions.RayError):
        return str(ray.get(handle.core_error.remote(), timeout=CORE_ERROR_TIMEOUT))
    return ""


def engine_names(indices: Sequence[int]) -> str:
    """Engines for a message: "engine 0", "engines 0, 2"."""
    return f"engine{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def is_engine_failure(error: BaseException) -> bool:
    """Whether an error of an engine call means that its process, or its core's, is gone."""
    return any(
        isinstance(e, (ray.exceptions.RayActorError, EngineReplaced))
        or type(e).__name__ == DEAD_CORE
        for e in cause_chain(error)
    )


def _has_placement(engine: EngineInstance) -> bool:
    """Whether an engine's placement group is whole; Ray calls it created without its nodes."""
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
