"""Dynamic batching: concurrent requests share searches, in a bounded queue, with an LRU cache.

Encoding and a flat scan cost little more for 64 queries than for one. The search runs in one worker
thread, so the event loop stays free to accept and to refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from cachetools import LRUCache

from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.metrics import Metrics

#: The answer of one query, ready to be sent.
Answer = bytes
#: `(queries, options) -> answers`; options are the other arguments of a search.
Search = Callable[[Sequence[str], Hashable], list[Answer]]
#: (query, options)
Key = tuple[str, Hashable]

#: Seconds that a slow search may make its successor wait for a batch to fill.
MAX_FILL_SECONDS = 0.1
#: If this many pieces of a batch all fail, no single query is the reason.
ALL_FAIL = 8
#: Bytes of a cache entry without its query and answer: a key, two links, two slots.
_ENTRY_BYTES = 500


class QueueFull(Exception):
    """The queue is full: try again in `seconds`."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class QueueClosed(Exception):
    """The server is shutting down."""


class Batcher:
    """Queries in, answers out; for use within one event loop. Equal pending queries share a search.

    Args:
        search: called in the worker thread. A batch that fails is searched again in halves, so that
            a query that cannot be answered fails its own requests and no other.
        limits: `max_batch`, `max_pending`, `cache_size`, `cache_mb`, and `max_wait_ms`: the time
            that a query waits for a batch to fill, or a tenth of the last search if that is longer.
            It waits for as many queries as there were last, so a lone client never waits.
    """

    def __init__(self, search: Search, metrics: Metrics, limits: Limits) -> None:
        self._search, self._metrics, self._limits = search, metrics, limits
        self._cache = Cache(limits.cache_size, limits.cache_mb * 2**20)
        self._waiting: dict[Key, asyncio.Future[Answer]] = {}  # in order of arrival
        self._running: dict[Key, asyncio.Future[Answer]] = {}
        self._requests = 0  # that wait for answers
        self._changed = asyncio.Event()
        self._closing = False
        self._rate = 0.0  # queries per second, of the last batches
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._loop = asyncio.create_task(self._serve())

    async def search(self, queries: Sequence[str], options: Hashable) -> list[Answer]:
        """The answer of each query, in order.

        Raises:
            QueueFull, QueueClosed: at once, with none of the queries accepted.
            Exception: whatever the search raised.
        """
        keys: list[Key] = [(query, options) for query in queries]
        distinct = dict.fromkeys(keys)
        found = {key: answer for key in distinct if (answer := self._cache.get(key)) is not None}
        missing = [key for key in distinct if key not in found]
        new = [key for key in missing if key not in self._waiting and key not in self._running]
        self._accept(len(new))
        self._metrics.cache_hits.inc(len(found))
        self._metrics.cache_misses.inc(len(new))
        loop = asyncio.get_running_loop()
        self._waiting |= {key: loop.create_future() for key in new}
        self._metrics.pending.set(len(self._waiting) + len(self._running))
        self._changed.set()
        futures = [self._waiting.get(key) or self._running[key] for key in missing]
        self._requests += 1
        try:
            if futures:
                # `wait` leaves the futures alone when this request is cancelled: others share them.
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._requests -= 1
        failed = next((f for f in futures if f.done() and f.exception()), None)
        if failed is not None:
            failed.result()
        found |= {key: future.result() for key, future in zip(missing, futures, strict=True)}
        return [found[key] for key in keys]

    def _accept(self, new: int) -> None:
        if not new:
            return
        if self._closing:
            raise QueueClosed("the server is shutting down")
        pending = len(self._waiting) + len(self._running)
        if pending and pending + new > self._limits.max_pending:
            seconds = pending / self._rate if self._rate else 1.0
            raise QueueFull(
                f"{pending} queries are waiting, no room for {new} more "
                f"(at most {self._limits.max_pending})",
                max(1, min(60, math.ceil(seconds))),
            )

    async def close(self) -> None:
        """Refuse new queries, answer the accepted ones, and stop.

        It does not wait for a search whose requests have all been cancelled.
        """
        self._closing = True
        self._changed.set()
        if not self._requests:
            self._loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop
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
            # first of them alone would make all others wait for it.
            max_wait = max(self._limits.max_wait_ms / 1e3, min(seconds / 10, MAX_FILL_SECONDS))
            await self._fill(min(expected_size, self._limits.max_batch), max_wait)
            start = clock()
            size = await self._search_batch()
            seconds = max(clock() - start, 1e-6)
            rate = size / seconds
            self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
            expected_size = size + len(self._waiting)

    async def _fill(self, expected_size: int, seconds: float) -> None:
        """Wait until `expected_size` queries are there, time is up, or the server closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._waiting) < expected_size and not self._closing:
                    self._changed.clear()
                    await self._changed.wait()

    async def _search_batch(self) -> int:
        """Search the oldest waiting queries, all with the same options; returns how many."""
        options = next(iter(self._waiting))[1]
        same = (key for key in self._waiting if key[1] == options)
        keys = list(islice(same, self._limits.max_batch))
        self._running = {key: self._waiting.pop(key) for key in keys}
        self._metrics.batch_size.observe(len(keys))
        loop = asyncio.get_running_loop()
        with self._metrics.search_seconds.time():
            answers = await loop.run_in_executor(
                self._worker, self._search_each, [query for query, _ in keys], options
            )
        for key, answer in zip(keys, answers, strict=True):
            future = self._running.pop(key)
            if isinstance(answer, Exception):
                future.set_exception(answer)
                future.exception()  # the client may have disconnected
            else:
                self._cache.put(key, answer)
                future.set_result(answer)
        self._metrics.pending.set(len(self._waiting))
        self._metrics.cache_bytes.set(self._cache.bytes)
        return len(keys)

    def _search_each(self, queries: list[str], options: Hashable) -> list[Answer | Exception]:
        """An answer or an error for each query.

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

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size = size if max_bytes else 0
        # With its query, since that may be the longer one.
        self._kept: LRUCache[Key, tuple[str, Answer]] = LRUCache(max_bytes, getsizeof=_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Memory of all entries, in bytes."""
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
