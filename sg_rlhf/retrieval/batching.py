"""Merge concurrent searches into batches, in a bounded queue.

Encoding and a flat scan cost little more for 64 queries than for one, so what arrives together is
searched together. The search runs in one worker thread; the event loop stays free to accept and to
refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from cachetools import LRUCache

from sg_rlhf.retrieval.metrics import Metrics
from sg_rlhf.retrieval.turns import Turns

#: An answer of one query, ready to be sent.
Answer = bytes
#: `(queries, options) -> answers`; options are what a search has beside its queries.
Search = Callable[[Sequence[str], Hashable], list[Answer]]
Key = tuple[str, Hashable]

#: Seconds that a slow search may make its successor wait for a batch to fill.
LONGEST_WAIT = 0.1
#: Queries of a request that are put into the queue at once, in about a millisecond.
A_PIECE = 1024
#: Requests that are given an answer in one turn of the event loop, where many asked the same.
A_TURN = 4096
#: If all of so many pieces of a batch fail, no single query is the reason.
ALL_FAIL = 8
#: What an entry of the cache needs beside its query and its answer: a key, two links, two places.
_ENTRY_BYTES = 500


class Overloaded(Exception):
    """The queue is full: try again in `seconds`."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Closing(Exception):
    """The server is shutting down."""


class _Request:
    """What one request waits for; `done` once every query of it is in `found`.

    `coming` places in the queue are kept for it.
    """

    __slots__ = ("coming", "done", "found", "missing")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.found: dict[Key, Answer] = {}
        # Of a dictionary's order: that of service.
        self.missing: dict[Key, None] = {}
        self.coming = 0

    def answer(self, key: Key, answer: Answer | Exception) -> None:
        if self.done.done():
            return
        if isinstance(answer, Exception):
            self.done.set_exception(answer)
            return
        self.found[key] = answer
        self.missing.pop(key, None)
        if not self.missing:
            self.done.set_result(None)


class Batcher:
    """Queries in, answers out; to be used within one event loop.

    Args:
        search: called in the worker thread; one that fails is tried again in halves, so that a
            query that cannot be answered fails its own requests and no other.
        turns: of the event loop, in which requests are taken in and put together.
        max_batch: queries in one search.
        max_wait: seconds that a query waits for a batch to fill, or a tenth of the last search if
            that is longer. It waits for as many as there were last, so a lone client never does.
        max_pending: queries waiting or being searched, beyond which new ones are refused; an idle
            server refuses none.
        cache_size: answers kept, by (query, options); 0 keeps none.
        cache_bytes: what they may need together with their queries.
    """

    def __init__(
        self,
        search: Search,
        metrics: Metrics,
        turns: Turns,
        max_batch: int,
        max_wait: float,
        max_pending: int,
        cache_size: int,
        cache_bytes: int,
    ) -> None:
        self._search = search
        self._metrics = metrics
        self._turns = turns
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._max_pending = max_pending
        self._cache = Cache(cache_size, cache_bytes)
        # Insertion order is the order of service. Equal queries in flight share one entry.
        self._waiting: dict[Key, dict[_Request, None]] = {}
        self._running: dict[Key, dict[_Request, None]] = {}
        self._coming = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._rate = 0.0  # queries a second, of the last batches
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._loop = asyncio.create_task(self._serve())

    async def search(self, queries: Sequence[str], options: Hashable) -> list[Answer]:
        """The answer of each query, in order. Cancelled, it takes back what nobody else wants.

        Raises:
            Overloaded, Closing: at once, with none of the queries accepted.
            Exception: whatever the search raised.
        """
        request = _Request(asyncio.get_running_loop())
        keys: list[Key] = [(query, options) for query in queries]
        distinct = list(dict.fromkeys(keys))
        pieces = [distinct[start : start + A_PIECE] for start in range(0, len(distinct), A_PIECE)]
        new = 0
        for piece in pieces:
            new += await self._turns.run(partial(self._look_up, request, piece))
        self._reserve(request, new)
        try:
            for piece in pieces:
                await self._turns.run(partial(self._enqueue, request, piece))
            if request.missing:
                await request.done
        finally:
            self._coming -= request.coming
            if request.missing:
                self._turns.call(partial(self._take_back, request))
        return await self._turns.run(lambda: [request.found[key] for key in keys])

    def _look_up(self, request: _Request, keys: Sequence[Key]) -> int:
        """Take what is known already; how many of the others nobody has asked for yet."""
        new = 0
        for key in keys:
            answer = self._cache.get(key)
            if answer is not None:
                request.found[key] = answer
                continue
            request.missing[key] = None
            new += key not in self._running and key not in self._waiting
        return new

    def _reserve(self, request: _Request, new: int) -> None:
        """Keep places in the queue until the request is in it, which may take several turns."""
        if new and self._closing:
            raise Closing("the server is shutting down")
        pending = len(self._waiting) + len(self._running) + self._coming
        if new and pending and pending + new > self._max_pending:
            seconds = pending / self._rate if self._rate else 1.0
            raise Overloaded(
                f"{pending} queries are waiting, no room for {new} more "
                f"(at most {self._max_pending})",
                max(1, min(60, math.ceil(seconds))),
            )
        request.coming = new
        self._coming += new
        self._metrics.cache_hits.inc(len(request.found))
        self._metrics.cache_misses.inc(new)

    def _enqueue(self, request: _Request, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in request.found:
                continue
            waiters = self._running.get(key)
            if waiters is None:
                waiters = self._waiting.get(key)
            if waiters is None:
                waiters = self._waiting[key] = {}
                if request.coming:
                    request.coming -= 1
                    self._coming -= 1
            waiters[request] = None
        self._metrics.pending.set(len(self._waiting) + len(self._running))
        self._changed.set()

    def _take_back(self, request: _Request) -> None:
        """Forget a request that was cancelled or failed: nobody reads the rest of its answers."""
        for key in request.missing:
            waiters = self._waiting.get(key)
            if waiters is not None:
                waiters.pop(request, None)
                if not waiters:
                    del self._waiting[key]

    @property
    def is_searching(self) -> bool:
        """Whether a search runs, wanted or not."""
        return bool(self._running)

    async def close(self) -> None:
        """Refuse new queries, answer the accepted ones, and stop.

        A search whose requests are all gone is not waited for.
        """
        self._closing = True
        self._changed.set()
        wanted = chain(self._waiting.values(), self._running.values())
        if any(not request.done.done() for requests in wanted for request in requests):
            await self._loop
        else:
            self._loop.cancel()
        self._worker.shutdown(wait=False)

    async def _serve(self) -> None:
        clock = asyncio.get_running_loop().time
        expected_size, seconds = 1, 0.0
        while True:
            while not self._waiting:
                if self._closing:
                    return
                self._changed.clear()
                await self._changed.wait()
            # Clients that were answered together return one after the other. Searching for the
            # first of them alone would let all others wait for it.
            wait_limit = max(self._max_wait, min(seconds / 10, LONGEST_WAIT))
            await self._gather(min(expected_size, self._max_batch), wait_limit)
            if not self._waiting:
                continue  # their clients have left
            start = clock()
            size = await self._search_batch()
            seconds = max(clock() - start, 1e-6)
            self._rate = size / seconds if not self._rate else 0.8 * self._rate + 0.2 * (
                size / seconds
            )  # fmt: skip
            expected_size = size + len(self._waiting)

    async def _gather(self, expected_size: int, seconds: float) -> None:
        """Wait until `expected_size` queries are there, time is up, or the server closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._waiting) < expected_size and not self._closing:
                    self._changed.clear()
                    await self._changed.wait()

    async def _search_batch(self) -> int:
        """Search the oldest waiting queries, all of one kind of options; returns how many."""
        options = next(iter(self._waiting))[1]
        keys = []
        for key in self._waiting:
            if key[1] == options:
                keys.append(key)
                if len(keys) == self._max_batch:
                    break
        self._running = {key: self._waiting.pop(key) for key in keys}
        self._metrics.batch_size.observe(len(keys))
        loop = asyncio.get_running_loop()
        with self._metrics.search_seconds.time():
            answers = await loop.run_in_executor(
                self._worker, self._search_each, [query for query, _ in keys], options
            )
        answered = 0
        for key, answer in zip(keys, answers, strict=True):
            if not isinstance(answer, Exception):
                self._cache.put(key, answer)
            # No longer running, so that nobody joins it while others have their turn.
            requests = self._running.pop(key)
            for request in requests:
                request.answer(key, answer)
            answered += len(requests)
            if answered > A_TURN:
                answered = 0
                await asyncio.sleep(0)
        self._metrics.pending.set(len(self._waiting))
        self._metrics.cache_bytes.set(self._cache.bytes)
        return len(keys)

    def _search_each(self, queries: list[str], options: Hashable) -> list[Answer | Exception]:
        """An answer for each query, or why there is none.

        Pieces that fail are searched again in halves. Where all eighths of a batch fail, the reason
        is no query (a full disk, a GPU that is gone), and all queries get it.
        """
        answers: dict[int, Answer | Exception] = {}
        pieces = [range(len(queries))]
        while pieces:
            failed: list[tuple[range, Exception]] = []
            for piece in pieces:
                try:
                    found = self._search(queries[piece.start : piece.stop], options)
                    answers.update(zip(piece, found, strict=True))
                except Exception as error:
                    failed.append((piece, error))
            is_over = not answers and len(failed) >= ALL_FAIL
            pieces = []
            for piece, reason in failed:
                if is_over or len(piece) == 1:
                    answers.update(dict.fromkeys(piece, reason))
                else:
                    half = len(piece) // 2
                    pieces += [piece[:half], piece[half:]]
        return [answers[row] for row in range(len(queries))]


class Cache:
    """Answers by key, the least recently used dropped first; bounded in number and in bytes."""

    def __init__(self, size: int, most_bytes: int) -> None:
        self._size = size if most_bytes else 0
        # With its query, since that may be the longer one.
        self._kept: LRUCache[Key, tuple[str, Answer]] = LRUCache(most_bytes, getsizeof=_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """What all entries need in memory."""
        return int(self._kept.currsize)

    def get(self, key: Key) -> Answer | None:
        """The answer, which becomes the most recently used one."""
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def put(self, key: Key, answer: Answer) -> None:
        """Keep an answer, unless it alone is larger than the cache."""
        kept = key[0], answer
        if not self._size or _bytes(kept) > self._kept.maxsize:
            return
        while len(self._kept) >= self._size and key not in self._kept:
            self._kept.popitem()
        self._kept[key] = kept


def _bytes(kept: tuple[str, Answer]) -> int:
    return sys.getsizeof(kept[0]) + sys.getsizeof(kept[1]) + _ENTRY_BYTES
