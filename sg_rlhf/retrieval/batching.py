"""Dynamic batching: concurrent requests share searches, in a bounded queue, with an LRU cache.

Encoding and a flat scan cost little more for 64 queries than for one. Searches run in a worker
thread, one at a time, so the event loop stays free to accept and to refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

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
    """Queries in, answers out, within one event loop. Equal pending queries share a search."""

    def __init__(self, search: Search, metrics: Metrics, limits: Limits) -> None:
        self._search, self._metrics, self._limits = search, metrics, limits
        self._cache: LRUCache[Key, Answer] = LRUCache(limits.cache_size)
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        #: Of all queries that are in the queue or being searched.
        self._pending: dict[Key, asyncio.Future[Answer]] = {}
        self._task = asyncio.create_task(self._serve())

    async def search(self, queries: Sequence[str], options: Hashable) -> list[Answer]:
        """The answer of each query, in order.

        Raises:
            QueueFull: at once, with none of the queries accepted.
            Exception: whatever the search raised.
        """
        keys: list[Key] = [(query, options) for query in queries]
        found = {key: self._cache[key] for key in keys if key in self._cache}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        new = [key for key in missing if key not in self._pending]
        pending = len(self._pending)
        if new and pending and pending + len(new) > self._limits.max_pending:
            raise QueueFull(
                f"{pending} queries are waiting, no room for {len(new)} more "
                f"(at most {self._limits.max_pending})"
            )
        self._metrics.cache_hits.inc(len(found))
        self._metrics.cache_misses.inc(len(new))
        for key in new:
            self._pending[key] = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(key)
        self._metrics.pending.set(len(self._pending))
        futures = {key: self._pending[key] for key in missing}
        if futures:
            # `wait` leaves the futures alone when this request is cancelled: others share them.
            await asyncio.wait(futures.values())
        found |= {key: future.result() for key, future in futures.items()}
        return [found[key] for key in keys]

    def close(self) -> None:
        """Stop; a server calls it when its requests have been answered or given up."""
        self._task.cancel()

    async def _serve(self) -> None:
        size = 1
        while True:
            keys = [await self._queue.get()]
            # Clients that were answered together return one after the other. Searching for the
            # first of them alone would make all others wait for it. A lone client never waits.
            if size > 1 and self._queue.qsize() < self._limits.max_batch - 1:
                await asyncio.sleep(self._limits.max_wait_ms / 1e3)
            while len(keys) < self._limits.max_batch and not self._queue.empty():
                keys.append(self._queue.get_nowait())
            size = len(keys)
            self._metrics.batch_size.observe(size)
            with self._metrics.search_seconds.time():
                answers = await asyncio.to_thread(self._search_each, keys)
            for key, answer in answers.items():
                future = self._pending.pop(key)
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                    future.exception()  # the client may have disconnected
                else:
                    future.set_result(answer)
                    if self._limits.cache_size:
                        self._cache[key] = answer
            self._metrics.pending.set(len(self._pending))

    def _search_each(self, keys: Sequence[Key]) -> dict[Key, Answer | Exception]:
        """An answer or an error for each query; if a search fails, each query is searched alone."""
        found: dict[Key, Answer | Exception] = {}
        for options in dict.fromkeys(options for _, options in keys):
            queries = [query for query, same in keys if same == options]
            try:
                answers = self._search(queries, options)
                found |= {(q, options): answer for q, answer in zip(queries, answers, strict=True)}
            except Exception as error:
                if len(queries) == 1:
                    found[queries[0], options] = error
                else:
                    for query in queries:
                        found |= self._search_each([(query, options)])
        return found
