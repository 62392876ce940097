"""Start the first requests of a batch together and in a fixed order.

Requests arrive one by one while the engine already computes, so its first steps would hold three
prompts in one run and five in another. The batch size changes rounding, and now and then a sampled
token: enough that a resumed run would differ from an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

#: Adds a request to the engine, and returns where its output will be.
AddRequest = Callable[[], Awaitable[Any]]


class BatchBarrier:
    """Holds the requests of a batch until all have arrived, then adds them in the order of keys.

    Args:
        parties: requests of the batch on this engine, including those that are skipped.
        pause: stops the engine; called when the first request arrives.
        resume: starts it again.
    """

    def __init__(
        self,
        parties: int,
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._missing = parties
        self._pause, self._resume = pause, resume
        self._waiting: dict[Any, tuple[AddRequest, asyncio.Future[Any]]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._complete = asyncio.Event()
        if not parties:
            self._complete.set()

    async def arrive(self, key: Any, add: AddRequest) -> Any:
        """Wait for the batch, add the request and return what ``add`` returns.

        Args:
            key: sorts the requests; unique.

        Raises:
            BaseException: of the engine, if it failed meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
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


async def _add_request(add: AddRequest, result: asyncio.Future[Any]) -> None:
    try:
        added = await add()
    except Exception as error:
        if not result.done():
            result.set_exception(error)
        return
    with contextlib.suppress(asyncio.InvalidStateError):  # the caller was cancelled
        result.set_result(added)
