"""The rollout engines of a run: which they are now, and another in the place of one that is lost.

Ray starts an engine's process again under the same handle, as often as
:data:`sg_rlhf.overlay.rollout_engine.MOST_RESTARTS` says. What it starts is an engine with the
model's first weights and without a connection to the trainer: nothing may be asked of it until both
are mended, so every engine has a name that changes (its incarnation).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sg_rlhf.overlay import failure
from sg_rlhf.overlay.asking import Incarnation, is_lost
from sg_rlhf.overlay.errors import EngineLost

#: An engine that is started again loads its model and compiles anew.
START_SECONDS = 600.0
#: For a worker that ends processes: it may have to be started itself.
END_SECONDS = 120.0


@ray.remote(num_cpus=0, max_retries=0)
def _end_processes(processes: Sequence[tuple[int, float]]) -> None:
    for pid, started in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == started:
                process.kill()


class RunEngines:
    """The engines of a run (:class:`sg_rlhf.overlay.asking.Engines`).

    Args:
        handles: Ray actors.
        allowed: how often each may be replaced.
        rejoin: connects all engines to the trainer again and sends them its weights.
    """

    def __init__(self, handles: Sequence[Any], allowed: int, rejoin: Callable[[], None]) -> None:
        self.handles = handles
        asked = [handle.incarnation.remote() for handle in handles]
        self.incarnations: list[Incarnation] = ray.get(asked) if asked else []
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
        for number, handle in enumerate(self.handles):
            try:
                found, _ = ray.get([handle.incarnation.remote(), handle.alive.remote()])
                lost = found.name != self.incarnations[number].name
            except ray.exceptions.RayError as error:
                if not is_lost(error):
                    raise
                lost = True
            if lost:
                self.replace(number)

    def replace(self, number: int) -> None:
        """Have an engine in the place of a lost one, with the policy's weights.

        Raises:
            EngineLost: it was lost more often than allowed, or does not come back.
        """
        if not self.may_replace(number):
            raise EngineLost(
                f"rollout engine {number} is lost (killed, crashed or hung), and was replaced "
                f"{self.replaced[number]} times before (sg.engine_restarts={self._allowed})"
            )
        self.replaced[number] += 1
        print(f"rollout engine {number} is lost: starting another in its place", flush=True)
        self.end(number)
        self.incarnations[number] = self._started_again(number)
        self._rejoin()

    def may_replace(self, number: int) -> bool:
        """Whether another may take an engine's place."""
        return self.replaced[number] < self._allowed

    def end(self, number: int) -> None:
        """End an engine's processes, whatever state they are in: Ray starts it again.

        One that is stopped by a signal ends neither itself nor what is under it.
        """
        lost = self.incarnations[number]
        on_its_node = NodeAffinitySchedulingStrategy(lost.node, soft=False)
        ending = _end_processes.options(scheduling_strategy=on_its_node)
        with contextlib.suppress(ray.exceptions.RayError):  # its node is gone too
            ray.get(ending.remote(lost.processes), timeout=END_SECONDS)

    def _started_again(self, number: int) -> Incarnation:
        """The engine that took the place."""
        handle = self.handles[number]
        deadline = time.monotonic() + START_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                found: Incarnation = ray.get(handle.incarnation.remote(), timeout=left)
            except ray.exceptions.ActorUnavailableError:
                time.sleep(0.5)
                continue
            except ray.exceptions.GetTimeoutError:
                break
            except ray.exceptions.RayActorError as error:
                raise EngineLost(
                    f"rollout engine {number} could not be started again: {failure.describe(error)}"
                ) from None
            if found.name != self.incarnations[number].name:
                return found
            time.sleep(0.5)  # it is about to end
        raise EngineLost(
            f"rollout engine {number} was not there again after {START_SECONDS:g} s (logs/)"
        )
