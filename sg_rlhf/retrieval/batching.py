"""Merge concurrent searches into batches, in a bounded queue.

Encoding and a flat scan cost little more for 64 queries than for one, so what arrives together is
searched together. The search runs in one worker thread; the event loop stays free to accept and to
refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cachetools import LRUCache

from sg_rlhf.retrieval.metrics import Metrics
from sg_rlhf.retrieval.search import Hit

Search = Callable[[Sequence[str], int], list[list[Hit]]]
Key = tuple[str, int]


#: Seconds that a slow search may make its successor wait for a batch to fill.
LONGEST_WAIT = 0.1


class Overloaded(Exception):
    """The queue is full, or the server is shutting down: try again later."""


class Batcher:
    """Queries in, hits out; to be used within one event loop.

    Args:
        search: `(queries, topk) -> hits`, called in the worker thread.
        max_batch: queries in one search.
        max_wait: seconds that a query waits for a batch to fill, or a tenth of the last search if
            that is longer. It waits for as many as there were last, so a lone client never does.
        max_pending: queries waiting or being searched, beyond which new ones are refused.
        cache_size: results kept, by (query, topk); 0 keeps none.
    """

    def __init__(
        self,
        search: Search,
        metrics: Metrics,
        max_batch: int,
        max_wait: float,
        max_pending: int,
        cache_size: int,
    ) -> None:
        self._search = search
        self._metrics = metrics
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._max_pending = max_pending
        self._cache: LRUCache[Key, list[Hit]] | None = LRUCache(cache_size) if cache_size else None
        # Insertion order is the order of service. Equal queries in flight share one entry.
        self._waiting: dict[Key, asyncio.Future[list[Hit]]] = {}
        self._running: dict[Key, asyncio.Future[list[Hit]]] = {}
        self._changed = asyncio.Event()
        self._closing = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._loop = asyncio.create_task(self._serve())

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The hits of each query, in order.

        Raises:
            Overloaded: at once, with none of the queries accepted.
            Exception: whatever the search raised.
        """
        keys = [(query, topk) for query in queries]
        found: dict[Key, list[Hit]] = {}
        futures: dict[Key, asyncio.Future[list[Hit]]] = {}
        new = []
        for key in dict.fromkeys(keys):
            cached = self._cache.get(key) if self._cache is not None else None
            if cached is not None:
                found[key] = cached
            elif future := self._running.get(key) or self._waiting.get(key):
                futures[key] = future
            else:
                new.append(key)
        if new:
            self._accept(new, futures)
        self._metrics.cache_hits.inc(len(found))
        self._metrics.cache_misses.inc(len(new))
        if futures:
            # A client that goes away must not cancel what others wait for.
            await asyncio.shield(asyncio.gather(*futures.values(), return_exceptions=True))
            found.update((key, future.result()) for key, future in futures.items())
        return [found[key] for key in keys]

    def _accept(self, new: list[Key], futures: dict[Key, asyncio.Future[list[Hit]]]) -> None:
        pending = len(self._waiting) + len(self._running)
        if self._closing:
            raise Overloaded("the server is shutting down")
        if pending + len(new) > self._max_pending:
            raise Overloaded(
                f"{pending} queries are waiting, no room for {len(new)} more "
                f"(at most {self._max_pending})"
            )
        loop = asyncio.get_running_loop()
        for key in new:
            futures[key] = self._waiting[key] = loop.create_future()
        self._metrics.pending.set(pending + len(new))
        self._changed.set()

    async def close(self) -> None:
        """Refuse new queries, answer the accepted ones, and stop."""
        self._closing = True
        self._changed.set()
        await self._loop
        self._worker.shutdown()

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
            start = clock()
            size = await self._search_batch()
            seconds = clock() - start
            expected_size = size + len(self._waiting)

    async def _gather(self, expected_size: int, seconds: float) -> None:
        """Wait until `expected_size` queries are there, time is up, or the server closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._waiting) < expected_size and not self._closing:
                    self._changed.clear()
                    await self._changed.wait()

    async def _search_batch(self) -> int:
        """Search the oldest waiting queries, all of one topk; returns how many."""
        topk = next(iter(self._waiting))[1]
        keys = [key for key in self._waiting if key[1] == topk][: self._max_batch]
        self._running = {key: self._waiting.pop(key) for key in keys}
        self._metrics.batch_size.observe(len(keys))
        loop = asyncio.get_running_loop()
        try:
            with self._metrics.search_seconds.time():
                results = await loop.run_in_executor(
                    self._worker, self._search, [query for query, _ in keys], topk
                )
        except Exception as error:
            for future in self._running.values():
                future.set_exception(error)
        else:
            for (key, future), hits in zip(self._running.items(), results, strict=True):
                future.set_result(hits)
                if self._cache is not None:
                    self._cache[key] = hits
        self._running = {}
        self._metrics.pending.set(len(self._waiting))
        return len(keys)
