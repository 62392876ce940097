"""Dynamic batching: concurrent requests share searches, in a bounded queue, with an LRU cache.

Encoding and a flat scan cost little more for 64 queries than for one. The search runs in one worker
thread, so the event loop stays free to accept and to refuse.
"""

from __future__ import annotations

import asyncio
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


class QueueFull(Exception):
    """Too many queries are waiting."""


class Batcher:
    """Queries in, answers out; for use within one event loop. Equal pending queries share a search.

    Args:
        search: called in the worker thread.
        limits: `max_batch`, `max_wait_ms`, `max_pending` and `cache_size`.
    """

    def __init__(self, search: Search, metrics: Metrics, limits: Limits) -> None:
        self._search, self._metrics, self._limits = search, metrics, limits
        self._cache: LRUCache[Key, Answer] = LRUCache(limits.cache_size)
        self._waiting: dict[Key, asyncio.Future[Answer]] = {}  # in order of arrival
        self._running: dict[Key, asyncio.Future[Answer]] = {}
        self._arrived = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._loop = asyncio.create_task(self._serve())

    async def search(self, queries: Sequence[str], options: Hashable) -> list[Answer]:
        """The answer of each query, in order.

        Raises:
            QueueFull: at once, with none of the queries accepted.
            Exception: whatever the search raised.
        """
        keys: list[Key] = [(query, options) for query in queries]
        found = {key: self._cache[key] for key in keys if key in self._cache}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        new = [key for key in missing if key not in self._waiting and key not in self._running]
        pending = len(self._waiting) + len(self._running)
        if new and pending and pending + len(new) > self._limits.max_pending:
            raise QueueFull(
                f"{pending} queries are waiting, no room for {len(new)} more "
                f"(at most {self._limits.max_pending})"
            )
        self._metrics.cache_hits.inc(len(found))
        self._metrics.cache_misses.inc(len(new))
        loop = asyncio.get_running_loop()
        self._waiting |= {key: loop.create_future() for key in new}
        self._metrics.pending.set(pending + len(new))
        futures = [self._waiting.get(key) or self._running[key] for key in missing]
        if futures:
            self._arrived.set()
            # `wait` leaves the futures alone when this request is cancelled: others share them.
            await asyncio.wait(futures)
        found |= {key: future.result() for key, future in zip(missing, futures, strict=True)}
        return [found[key] for key in keys]

    def close(self) -> None:
        """Stop; a server calls it when its requests have been answered or given up."""
        self._loop.cancel()
        self._worker.shutdown(wait=False)

    async def _serve(self) -> None:
        size = 1
        while True:
            await self._arrived.wait()
            # Clients that were answered together return one after the other. Searching for the
            # first of them alone would make all others wait for it. A lone client never waits.
            if size > 1 and len(self._waiting) < self._limits.max_batch:
                await asyncio.sleep(self._limits.max_wait_ms / 1e3)
            size = await self._search_batch()
            if not self._waiting:
                self._arrived.clear()

    async def _search_batch(self) -> int:
        """Search the oldest waiting queries, all with the same options; returns how many."""
        options = next(iter(self._waiting))[1]
        same = (key for key in self._waiting if key[1] == options)
        keys = list(islice(same, self._limits.max_batch))
        self._running = {key: self._waiting.pop(key) for key in keys}
        self._metrics.batch_size.observe(len(keys))
        queries = [query for query, _ in keys]
        with self._metrics.search_seconds.time():
            answers = await asyncio.get_running_loop().run_in_executor(
                self._worker, self._search_each, queries, options
            )
        for key, answer in zip(keys, answers, strict=True):
            future = self._running.pop(key)
            if isinstance(answer, Exception):
                future.set_exception(answer)
                future.exception()  # the client may have disconnected
            else:
                future.set_result(answer)
                if self._limits.cache_size:
                    self._cache[key] = answer
        self._metrics.pending.set(len(self._waiting))
        return len(keys)

    def _search_each(self, queries: Sequence[str], options: Hashable) -> list[Answer | Exception]:
        """An answer or an error for each query; if a batch fails, each query is searched alone."""
        try:
            return list(self._search(queries, options))
        except Exception as error:
            if len(queries) == 1:
                return [error]
            return [self._search_each([query], options)[0] for query in queries]
