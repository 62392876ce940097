"""The rollout engines of a run: which they are now, and another in the place of one that is lost.

Ray starts an engine's process again under the same handle, as often as
:data:`sg_rlhf.overlay.rollout.engine.MAX_RESTARTS` says. What it starts is an engine with the
model's first weights and without a connection to the trainer: nothing may be asked of it until both
are mended, so every engine has a name that changes (its incarnation).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.overlay.cluster import placement
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import EngineLost
from sg_rlhf.overlay.rollout.dispatch import EngineInstance, is_engine_failure

#: An engine that is started again loads its model and compiles anew.
START_TIMEOUT = 600.0
#: An engine whose machine is gone gets a place on another within this, or there is none.
PLACEMENT_TIMEOUT = 20.0
#: Between two looks for it.
POLL_INTERVAL = 2.0
#: For a worker that ends processes: it may have to be started itself.
KILL_TIMEOUT = 120.0


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
        allowed: how often each may be replaced.
        rejoin: connects all engines to the trainer again and sends them its weights.

    Attributes:
        ranks: held by whoever gives the trainer's ranks work, as replacing an engine does. Two
            threads that did would give it to the ranks in two orders.
    """

    def __init__(self, handles: Sequence[Any], allowed: int, rejoin: Callable[[], None]) -> None:
        self.handles = handles
        asked = [handle.incarnation.remote() for handle in handles]
        self.incarnations: list[EngineInstance] = ray.get(asked) if asked else []
        self.ranks = threading.Condition()
        #: How often each was replaced, and since when the last question.
        self.replaced = [0] * len(handles)
        self._allowed, self._rejoin, self._told = allowed, rejoin, 0

    def newly_replaced(self) -> int:
        """How many were replaced since the last question."""
        total = sum(self.replaced)
        found, self._told = total - self._told, total
        return found

    def check(self) -> None:
        """Replace the engines that were lost while nobody asked them.

        Raises:
            EngineLost: as of :meth:`replace`.
        """
        with self.ranks:
            self._replace(self._lost())

    def replace(self, number: int, lost: str) -> None:
        """Have an engine in the place of a lost one, with the policy's weights.

        Args:
            number: of the engine.
            lost: name of its incarnation that is lost; there is nothing to do if it is another now.

        Raises:
            EngineLost: it was lost more often than allowed, or does not come back.
        """
        with self.ranks:
            if self.incarnations[number].name == lost:
                self._replace([number])

    def _replace(self, lost: list[int]) -> None:
        """Others may be lost with them. All must be there before any is connected."""
        if not lost:
            return
        while lost:
            for number in lost:
                self._start_another(number)
            lost = self._lost()
        self._rejoin()

    def _lost(self) -> list[int]:
        """The engines that do not answer any more, or are another than is known here."""
        found = []
        for number, handle in enumerate(self.handles):
            try:
                now, _ = ray.get([handle.incarnation.remote(), handle.alive.remote()])
                if now.name != self.incarnations[number].name:
                    found.append(number)
            except ray.exceptions.RayError as error:
                if not is_engine_failure(error):
                    raise
                found.append(number)
        return found

    def _start_another(self, number: int) -> None:
        if not self.may_replace(number):
            raise EngineLost(
                f"rollout engine {number} is lost (killed, crashed or hung), and was replaced "
                f"{self.replaced[number]} times before (sg.engine_restarts={self._allowed})"
            )
        self.replaced[number] += 1
        print(f"rollout engine {number} is lost: starting another in its place", flush=True)
        self.end(number)
        self.incarnations[number] = self._started_again(number)

    def may_replace(self, number: int) -> bool:
        """Whether another may take an engine's place."""
        return self.replaced[number] < self._allowed

    def end(self, number: int) -> None:
        """End an engine's processes, whatever state they are in: Ray starts it again.

        One that is stopped by a signal ends neither itself nor what is under it.
        """
        lost = self.incarnations[number]
        on_its_node = NodeAffinitySchedulingStrategy(lost.node, soft=False)
        ending = _kill_processes.options(scheduling_strategy=on_its_node)
        with contextlib.suppress(ray.exceptions.RayError):  # its node is gone too
            ray.get(ending.remote(lost.processes), timeout=KILL_TIMEOUT)

    def _started_again(self, number: int) -> EngineInstance:
        """The engine that took the place."""
        handle, lost = self.handles[number], self.incarnations[number]
        deadline, homeless_until = time.monotonic() + START_TIMEOUT, None
        asked = handle.incarnation.remote()
        while (now := time.monotonic()) < deadline:
            # A question to one that has no place yet waits, or fails at once.
            if _has_placement(lost):
                homeless_until = None
            elif now > (homeless_until := homeless_until or now + PLACEMENT_TIMEOUT):
                raise EngineLost(_no_capacity_message(number, lost))
            answered, _ = ray.wait([asked], timeout=min(POLL_INTERVAL, deadline - now))
            if not answered:
                continue
            try:
                found: EngineInstance = ray.get(asked)
            except ray.exceptions.ActorUnavailableError:
                found = lost
            except ray.exceptions.RayActorError as error:
                raise EngineLost(
                    f"rollout engine {number} could not be started again: "
                    f"{error_report.summarize(error)}"
                ) from None
            if found.name != lost.name:
                return found
            time.sleep(0.5)  # it is about to end
            asked = handle.incarnation.remote()
        raise EngineLost(
            f"rollout engine {number} was not there again after {START_TIMEOUT:g} s (logs/)"
        )


def _has_placement(engine: EngineInstance) -> bool:
    """Whether the place that an engine had is still one, here or on another machine.

    Ray takes a group for whole again and again while it looks for a place of a machine that is
    gone, so its machines are asked for, too.
    """
    if engine.group is None:
        return True
    found = placement_group_table().get(engine.group, {})
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return found.get("state") == "CREATED" and {*found["bundles_to_node_id"].values()} <= alive


def _no_capacity_message(number: int, engine: EngineInstance) -> str:
    address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == engine.node), "")
    lacking = placement.missing_resources([placement.BUNDLE], placement.nodes())
    return (
        f"rollout engine {number} is lost with its machine {address}, and no other has a place for "
        f"it: {lacking}"
    )
