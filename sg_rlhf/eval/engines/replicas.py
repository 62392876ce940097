"""Several engines as Ray actors, one per group of GPUs, fed from one queue."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sg_rlhf.eval.engines.base import Completion, Engine, EngineOptions, Request
from sg_rlhf.tasks.questions import EvalError, one_line

StartEngine: TypeAlias = Callable[[EngineOptions], Engine]

#: Most requests in flight per replica: more than vLLM runs at a time, so that it never waits.
MAX_IN_FLIGHT = 512
#: Share of the queue that is dispatched at first; the rest goes to the replicas that finish first.
INITIAL_SHARE = 2 / 3


class _Worker:
    """One engine in a Ray actor.

    Args:
        variables: set before the engine's library is imported. As arguments they are on no
            dashboard of Ray's, where a token has no place.
    """

    def __init__(
        self, options: EngineOptions, start: StartEngine, variables: Mapping[str, str]
    ) -> None:
        os.environ.update(variables)
        self._engine = start(options)

    def ready(self) -> bool:
        return True

    def work(self, requests: list[Request]) -> list[Completion]:
        """Add requests and run the engine until at least one response is ready."""
        if requests:
            self._engine.add(requests)
        while True:
            done = self._engine.step()
            if done:
                return done


def hub_variables() -> dict[str, str]:
    """This process's variables for the Hugging Face hub: cache, token, offline mode."""
    prefixes = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


class Shares:
    """The queue of several engines, and how many requests each may have in flight.

    Attributes:
        held: requests in flight per engine.
    """

    def __init__(self, engines: int) -> None:
        self.held = [0] * engines
        self._queue: deque[Request] = deque()
        self._limit = 0

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. An engine may have a share of all open requests in flight."""
        self._queue.extend(requests)
        is_open = len(self._queue) + sum(self.held)
        self._limit = min(MAX_IN_FLIGHT, math.ceil(INITIAL_SHARE * is_open / len(self.held)))

    def take(self, engine: int) -> list[Request]:
        """The requests to dispatch to an engine now, often none."""
        # Dialogues add a few requests at a time, and the share falls as they end: an engine may
        # hold more than its share by then.
        count = max(0, min(len(self._queue), self._limit - self.held[engine]))
        self.held[engine] += count
        return [self._queue.popleft() for _ in range(count)]

    def finished(self, engine: int, count: int) -> None:
        """Record how many requests an engine finished."""
        self.held[engine] -= count


class Replicas:
    """Engines behind one queue: an engine with free capacity takes the next requests.

    Joins the cluster of `RAY_ADDRESS`, or starts Ray here.

    Args:
        start_one: starts an engine in the process that calls it.
    """

    def __init__(self, options: EngineOptions, start_one: StartEngine) -> None:
        from sg_rlhf.ray_session import auth_token

        auth_token.set_auth_token()
        import ray

        from sg_rlhf.ray_session import cluster

        self._ray = ray
        gpus = options.replicas * options.tensor_parallel
        variables = {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "OMP_", "SG_"))}
        # A worker without a GPU of its own must not take the machine for a CPU one, nor another
        # way round.
        variables["SG_PLATFORM"] = "cpu" if options.cpu else "cuda"
        settings: dict[str, Any] = {
            "runtime_env": {"env_vars": variables | {"TOKENIZERS_PARALLELISM": "false"}},
            "log_to_driver": False,
            "logging_level": "warning",
        }
        try:
            if "RAY_ADDRESS" in os.environ:
                cluster.join(os.environ["RAY_ADDRESS"], **settings)
            else:
                if options.cpu:
                    # Logical: processes, not devices.
                    settings |= {
                        "num_gpus": gpus,
                        "num_cpus": options.replicas,
                        "object_store_memory": 256 * 2**20,
                    }
                cluster.start(**settings)
        except cluster.ClusterError as error:
            raise EvalError(f"--replicas: {error}") from error
        try:
            self._check(gpus)
            actor = ray.remote(num_cpus=1, num_gpus=options.tensor_parallel)(_Worker)
            one = replace(options, replicas=1)
            self._actors = [
                actor.remote(one, start_one, hub_variables()) for _ in range(options.replicas)
            ]
            ray.get([worker.ready.remote() for worker in self._actors])
        except ray.exceptions.RayError as error:
            self.close()
            raise EvalError(f"--replicas: an engine did not start: {one_line(error)}") from error
        except EvalError:
            self.close()
            raise
        self._shares = Shares(options.replicas)
        #: Calls under way, and whose they are.
        self._running: dict[Any, int] = {}

    def add(self, requests: Sequence[Request]) -> None:
        self._shares.add(requests)
        for worker in range(len(self._actors)):
            if worker not in self._running.values():
                self._feed(worker)

    def step(self) -> list[Completion]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        worker = self._running.pop(ready[0])
        try:
            done: list[Completion] = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            raise EvalError(f"a replica died: {one_line(error)}") from error
        self._shares.finished(worker, len(done))
        self._feed(worker)
        return done

    def close(self) -> None:
        self._ray.shutdown()

    def _feed(self, worker: int) -> None:
        requests = self._shares.take(worker)
        # An engine without an open request never has a response ready.
        if self._shares.held[worker]:
            self._running[self._actors[worker].work.remote(requests)] = worker

    def _check(self, gpus: int) -> None:
        have = self._ray.cluster_resources().get("GPU", 0)
        if have < gpus:
            raise EvalError(
                f"--replicas: the Ray cluster has {have:g} GPUs, but replicas x tensor-parallel "
                f"is {gpus}"
            )
