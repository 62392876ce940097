"""Work of the event loop in small pieces, so that no turn of it is long.

Whoever waits for the server (`/health`, a small request) waits for the turn that runs. Many pieces
that are due at once, of hundreds of connections or of one, are therefore spread over turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: What it costs beside its own time, and the call.
_Piece = tuple[float, Callable[[], object]]

#: Seconds of a turn in which pieces are begun.
A_TURN = 0.004


class Turns:
    """Runs pieces of work one after the other, for `seconds` in each turn of the event loop.

    A piece that is due while there is time, and nobody before it, is done at once. A piece should
    take milliseconds at most, since it is not interrupted.
    """

    def __init__(self, seconds: float = A_TURN) -> None:
        self._seconds = seconds
        self._urgent: deque[_Piece] = deque()
        self._others: deque[_Piece] = deque()
        self._end: float | None = None

    def call(self, work: Callable[[], object], urgent: bool = False, seconds: float = 0.0) -> None:
        """Do `work` now or in a later turn.

        Args:
            urgent: before all that is not.
            seconds: what it costs beside the time that the call itself takes.
        """
        if self._is_free():
            self._spend(seconds)
            work()
        else:
            (self._urgent if urgent else self._others).append((seconds, work))

    async def run(self, work: Callable[[], T], seconds: float = 0.0) -> T:
        """What `work` returns or raises; cancelled while it waits, it is not done."""
        if self._is_free():
            self._spend(seconds)
            return work()
        done: asyncio.Future[T] | None = asyncio.get_running_loop().create_future()

        def finish() -> None:
            if done is None or done.done():
                return
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._others.append((seconds, finish))
        assert done is not None
        try:
            return await done
        finally:
            # An error holds its frames, and these would hold it: the queries of all requests that
            # were refused would be freed at once, by a collection of garbage.
            done = None

    def _is_free(self) -> bool:
        """Whether a piece may be done at once."""
        if self._end is None:
            self._begin()
        return not self._urgent and not self._others and self._is_time_left()

    def _is_time_left(self) -> bool:
        return self._end is not None and time.monotonic() < self._end

    def _begin(self) -> None:
        self._end = time.monotonic() + self._seconds
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """The next turn."""
        self._end = None
        if not self._urgent and not self._others:
            return
        self._begin()
        if self._urgent and self._others:
            # One at least, or they might wait for ever.
            self._do(self._others.popleft())
        while (self._urgent or self._others) and self._is_time_left():
            self._do((self._urgent or self._others).popleft())

    def _do(self, piece: _Piece) -> None:
        seconds, work = piece
        self._spend(seconds)
        work()

    def _spend(self, seconds: float) -> None:
        if self._end is not None:
            self._end -= seconds
