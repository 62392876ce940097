"""Start the first requests of a batch together and in a fixed order.

Requests arrive one by one while the engine already computes, so the sizes of its first batches
would vary. They change rounding, and now and then a sampled token: enough that a resumed run would
differ from an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from sg_rlhf.sampling.request_seeds import SeedKey

#: Of a response: its prompt's seed, and its index among the prompt's responses.
RequestKey = tuple[SeedKey, int]
T = TypeVar("T")


class BatchBarrier(Generic[T]):
    """Holds the requests of a batch until all have arrived, then adds them in the order of keys."""

    def __init__(
        self,
        parties: int,
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._missing = parties
        self._pause, self._resume = pause, resume
        self._waiting: dict[RequestKey, tuple[Callable[[], Awaitable[T]], asyncio.Future[T]]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._complete = asyncio.Event()
        if not parties:
            self._complete.set()

    async def arrive(self, key: RequestKey, add: Callable[[], Awaitable[T]]) -> T:
        """Wait for the batch, add the request; the result of ``add``, or the engine's error."""
        if self._failure is not None:
            raise self._failure
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[key] = (add, result)
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        self._count_one()
        return await result

    def skip(self) -> None:
        """Count a request that will not arrive: it failed, or its prompt fills the context."""
        self._count_one()

    def _count_one(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._complete.set()

    async def _open(self) -> None:
        try:
            await self._pause()
            try:
                await self._complete.wait()
                for _, (add, result) in sorted(self._waiting.items(), key=lambda one: one[0]):
                    await _add_request(add, result)
            finally:
                await self._resume()
        except BaseException as error:  # a dead engine: fail all requests, later ones too
            self._failure = error
            for _, result in self._waiting.values():
                if not result.done():
                    result.set_exception(error)
            if not isinstance(error, Exception):
                raise


async def _add_request(add: Callable[[], Awaitable[T]], result: asyncio.Future[T]) -> None:
    try:
        added = await add()
    except Exception as error:
        if not result.done():
            result.set_exception(error)
        return
    with contextlib.suppress(asyncio.InvalidStateError):  # the caller was cancelled
        result.set_result(added)
