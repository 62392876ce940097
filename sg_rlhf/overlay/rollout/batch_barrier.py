"""The first requests of a batch enter an engine together and in one order.

Requests arrive one by one while the engine already computes, so that its first steps hold now three
prompts and now five. A matrix product of other height rounds otherwise, and one token in a million
falls otherwise by that: enough that a run which was interrupted does not end as one that was not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

#: Adds a request to the engine, and returns where its output will be.
AddRequest = Callable[[], Awaitable[Any]]


class BatchBarrier:
    """Holds the requests of one batch until all are there, then adds them by their keys.

    Args:
        expected: how many come or are excused.
        pause: keeps the engine from computing; begun when the first request is there.
        resume: lets it compute.
    """

    def __init__(
        self,
        expected: int,
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._missing = expected
        self._pause, self._resume = pause, resume
        self._waiting: dict[Any, tuple[AddRequest, asyncio.Future[Any]]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._complete = asyncio.Event()
        if not expected:
            self._complete.set()

    async def enter(self, key: Any, add: AddRequest) -> Any:
        """What ``add`` returns, once every request of the batch is there.

        Args:
            key: orders the requests; no two have the same.

        Raises:
            BaseException: what the engine failed with while the batch gathered.
        """
        if self._failure is not None:
            raise self._failure
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = (add, entered)
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        self._arrived()
        return await entered

    def excuse(self) -> None:
        """One of them does not come: it failed before, or had no room for a response."""
        self._arrived()

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._complete.set()

    async def _open(self) -> None:
        try:
            await self._pause()
            try:
                await self._complete.wait()
                for _, (add, entered) in sorted(self._waiting.items(), key=lambda one: one[0]):
                    await _add_request(add, entered)
            finally:
                await self._resume()
        except BaseException as error:  # a dead engine: all of them hear of it, the later ones too
            self._failure = error
            for _, entered in self._waiting.values():
                if not entered.done():
                    entered.set_exception(error)
            if not isinstance(error, Exception):
                raise


async def _add_request(add: AddRequest, entered: asyncio.Future[Any]) -> None:
    try:
        added = await add()
    except Exception as error:
        if not entered.done():
            entered.set_exception(error)
        return
    with contextlib.suppress(asyncio.InvalidStateError):  # who asked is gone
        entered.set_result(added)
