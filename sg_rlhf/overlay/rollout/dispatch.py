"""Send prompts to the rollout engines, and send them again if an engine is lost.

A response depends only on its seed (:mod:`sg_rlhf.sampling.request_seeds`), so a restarted engine
returns the same responses. If an engine is lost, its whole batch is resubmitted, completed prompts
included: batch composition changes rounding, so part of a batch would not reproduce.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import ObjectRef

from sg_rlhf.overlay.rollout.engine_pool import EnginePool, is_engine_failure
from sg_rlhf.overlay.rollout.samples import Response
from sg_rlhf.sampling.request_seeds import SeedKey


class RequestTag(NamedTuple):
    """Sent to an engine with each prompt; without ``batch`` for a later prompt."""

    seed_key: SeedKey
    instance_id: str
    batch: str | None
    batch_size: int


@dataclass
class _Request:
    """A prompt that was sent to an engine."""

    number: int
    engine: int
    arguments: dict[str, Any]
    num_samples: int
    batch: str | None = None
    batch_size: int = 0
    instance_id: str = ""
    is_completed: bool = False


class RolloutDispatcher:
    """Requests of one rollout or one evaluation, numbered in the order of submission."""

    def __init__(
        self,
        engines: EnginePool,
        seed: int,
        namespace: str,
        step: int,
        numbers: Iterator[int] | None = None,
        as_one_batch: bool = True,
    ) -> None:
        self._engines = engines
        self._seed, self._namespace, self._step = seed, namespace, step
        self._as_one_batch = as_one_batch
        self._numbers = itertools.count() if numbers is None else numbers
        self._requests: list[_Request] = []
        self._pending: dict[ObjectRef, _Request] = {}

    def submit(self, prompts: Iterable[dict[str, Any]], num_samples: int) -> None:
        """Send prompts to the engines with the fewest pending responses, at first as a batch."""
        # Counted here, not queried from the engines: one of them may be lost unnoticed.
        load = [0] * len(self._engines.handles)
        for request in self._pending.values():
            load[request.engine] += request.num_samples
        new = []
        for arguments in prompts:
            engine = load.index(min(load))
            load[engine] += num_samples
            new.append(_Request(next(self._numbers), engine, arguments, num_samples))
        if self._as_one_batch and not self._requests:
            _assign_batches(new)
        self._requests += new
        for request in new:
            self._send(request)

    def _send(self, request: _Request) -> None:
        request.instance_id = self._engines.instances[request.engine].name
        key = SeedKey(self._seed, self._namespace, self._step, request.number)
        tag = RequestTag(key, request.instance_id, request.batch, request.batch_size)
        engine = self._engines.handles[request.engine]
        reference = engine.generate_responses.remote(
            tag=tag, num_samples=request.num_samples, **request.arguments
        )
        self._pending[reference] = request

    def completions(self) -> Iterator[tuple[int, list[Response]]]:
        """Yield each prompt's number and responses as they complete; raises EngineLost."""
        lost: dict[int, str] = {}
        while self._pending or lost:
            if not self._pending:  # a restart syncs all engines, so the others must be idle
                for engine in sorted(lost):
                    self._resubmit(engine, lost[engine])
                lost.clear()
                continue
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=10.0)
            for reference in ready:
                request = self._pending.pop(reference)
                try:
                    responses = ray.get(reference)
                except Exception as error:
                    if not is_engine_failure(error):
                        raise
                    lost[request.engine] = request.instance_id
                    continue
                self._engines.answered.add(request.engine)
                if not request.is_completed:
                    request.is_completed = True
                    yield request.number, responses

    def _resubmit(self, engine: int, lost: str) -> None:
        self._engines.replace(engine, lost)
        requests = [request for request in self._requests if request.engine == engine]
        if all(request.is_completed for request in requests):
            return
        if self._as_one_batch:
            _assign_batches(requests)
        for request in requests:
            self._send(request)


def _assign_batches(requests: Sequence[_Request]) -> None:
    """Make the requests of each engine one batch."""
    batch = uuid.uuid4().hex
    responses: dict[int, int] = {}
    for request in requests:
        responses[request.engine] = responses.get(request.engine, 0) + request.num_samples
    for request in requests:
        request.batch, request.batch_size = batch, responses[request.engine]
