"""The batcher: what arrives together is searched together, and nothing accepted is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sg_rlhf.retrieval.batching import Batcher, Cache, QueueClosed, QueueFull
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.metrics import Metrics


def hits(query: str, topk: int) -> bytes:
    """An answer that tells which query and which topk it is of."""
    return f"{query} {topk}".encode()


class Search:
    """A search that notes what it is asked, and waits at a gate while it is closed."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, queries: Sequence[str], topk: Any) -> list[bytes]:
        self.batches.append((list(queries), topk))
        self.threads.add(threading.get_ident())
        assert self.gate.wait(300)
        if any(query.startswith("bad") for query in queries):
            raise RuntimeError("no such index page")
        return [hits(query, topk) for query in queries]


def make(search: Search, **limits: Any) -> Batcher:
    settings = {"max_batch": 64, "max_wait_ms": 5, "max_pending": 1000, "cache_size": 0, **limits}
    return Batcher(search, Metrics(), Limits(**settings))


async def until(condition: object) -> None:
    for _ in range(60_000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited 300 seconds")


def test_concurrent_queries_are_searched_together() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        search.gate.clear()
        first = asyncio.create_task(batcher.search(["first"], 2))
        await until(lambda: search.batches)
        others = [asyncio.create_task(batcher.search([f"q{i}"], 2)) for i in range(40)]
        await asyncio.sleep(0)
        search.gate.set()
        assert await first == [hits("first", 2)]
        for number, other in enumerate(others):
            assert await other == [hits(f"q{number}", 2)]
        await batcher.close()

    asyncio.run(scenario())
    assert [len(queries) for queries, _ in search.batches] == [1, 40]
    assert threading.get_ident() not in search.threads, "searched in the event loop's thread"


def test_a_large_request_is_split_and_comes_back_in_order() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        queries = [f"q{i % 150}" for i in range(300)]
        assert await batcher.search(queries, 1) == [hits(query, 1) for query in queries]
        assert await batcher.search([], 3) == []
        await batcher.close()

    asyncio.run(scenario())
    # Duplicates are searched once.
    assert [len(queries) for queries, _ in search.batches] == [64, 64, 22]


def test_each_topk_is_searched_by_itself() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        requests = [batcher.search(["same"], topk) for topk in (1, 5, 3, 5)]
        assert await asyncio.gather(*requests) == [[hits("same", k)] for k in (1, 5, 3, 5)]
        await batcher.close()

    asyncio.run(scenario())
    assert sorted(topk for _, topk in search.batches) == [1, 3, 5]


def test_a_full_queue_refuses_at_once_and_whole_requests() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_pending=10)
        search.gate.clear()
        accepted = asyncio.create_task(batcher.search([f"a{i}" for i in range(8)], 1))
        await until(lambda: search.batches)
        with pytest.raises(QueueFull, match="8 queries are waiting, no room for 3 more") as full:
            await asyncio.wait_for(batcher.search(["b1", "b2", "b3"], 1), 300)
        assert 1 <= full.value.seconds <= 60
        # The refused request left nothing behind, and what is under way may be joined.
        more = asyncio.create_task(batcher.search(["b1", "b2", "a0"], 1))
        await asyncio.sleep(0)
        search.gate.set()
        assert len(await accepted) == 8
        assert await more == [hits(query, 1) for query in ("b1", "b2", "a0")]
        await batcher.close()

    asyncio.run(scenario())


def test_close_answers_what_was_accepted_and_refuses_the_rest() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_batch=4)
        search.gate.clear()
        accepted = [asyncio.create_task(batcher.search([f"q{i}"], 1)) for i in range(20)]
        await until(lambda: search.batches)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(QueueClosed, match="shutting down"):
            await batcher.search(["late"], 1)
        search.gate.set()
        assert await asyncio.gather(*accepted) == [[hits(f"q{i}", 1)] for i in range(20)]
        await closing

    asyncio.run(scenario())


def test_a_client_that_goes_away_takes_nobody_along() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        search.gate.clear()
        leaving = asyncio.create_task(batcher.search(["shared"], 1))
        staying = asyncio.create_task(batcher.search(["shared", "own"], 1))
        await until(lambda: search.batches)
        leaving.cancel()
        await asyncio.sleep(0)
        search.gate.set()
        assert await staying == [hits("shared", 1), hits("own", 1)]
        await batcher.close()

    asyncio.run(scenario())


def test_an_idle_batcher_takes_more_than_may_wait() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_pending=10)
        queries = [f"q{i}" for i in range(25)]
        assert await batcher.search(queries, 1) == [hits(query, 1) for query in queries]
        await batcher.close()

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_search_that_nobody_wants() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        search.gate.clear()
        leaving = asyncio.create_task(batcher.search(["left"], 1))
        await until(lambda: search.batches)
        leaving.cancel()
        await asyncio.sleep(0)
        await asyncio.wait_for(batcher.close(), 300)
        search.gate.set()

    asyncio.run(scenario())


def test_a_query_that_cannot_be_answered_fails_its_requests_and_no_other() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, cache_size=10)
        search.gate.clear()
        first = asyncio.create_task(batcher.search(["first"], 1))
        await until(lambda: search.batches)
        # Searched together with it.
        good = [asyncio.create_task(batcher.search([f"good {i}"], 1)) for i in range(6)]
        bad = asyncio.create_task(batcher.search(["bad", "good 2"], 1))
        more = [asyncio.create_task(batcher.search([f"more {i}"], 1)) for i in range(6)]
        await asyncio.sleep(0)
        search.gate.set()
        await first
        with pytest.raises(RuntimeError, match="no such index page"):
            await bad
        assert await asyncio.gather(*good) == [[hits(f"good {i}", 1)] for i in range(6)]
        assert await asyncio.gather(*more) == [[hits(f"more {i}", 1)] for i in range(6)]
        await batcher.close()

    asyncio.run(scenario())
    assert len(search.batches[1][0]) == 13


@pytest.mark.parametrize("size", [1, 2, 3, 64, 256])
def test_a_failure_of_no_single_query_is_searched_a_few_times(size: int) -> None:
    """A GPU that is gone, a full disk: every search fails, and all are told soon."""
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_batch=size)
        with pytest.raises(RuntimeError, match="no such index page"):
            await batcher.search([f"bad {i}" for i in range(size)], 1)
        assert await batcher.search(["good"], 1) == [hits("good", 1)]
        await batcher.close()

    asyncio.run(scenario())
    assert len(search.batches) - 1 <= 15


@pytest.mark.parametrize("bad", [{0}, {63}, {7, 8}, set(range(32)), set(range(5, 40)), {0, 32, 63}])
def test_good_queries_of_a_failing_batch_are_answered(bad: set[int]) -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        names = [f"{'bad' if i in bad else 'good'} {i}" for i in range(64)]
        asked = (batcher.search([name], 1) for name in names)
        for name, answer in zip(
            names, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            expected = RuntimeError if name.startswith("bad") else list
            assert isinstance(answer, expected), name
        await batcher.close()

    asyncio.run(scenario())
    assert max(len(queries) for queries, _ in search.batches) > 32, "they were one batch"


def test_the_cache_is_bounded_in_bytes() -> None:
    cache = Cache(1000, 20_000)
    for number in range(1000):
        cache.put((f"query {number}", 1), b"x" * 1000)
        assert cache.bytes <= 20_000
    assert len(cache) == 12
    assert cache.get(("query 0", 1)) is None
    assert cache.get(("query 999", 1)) == b"x" * 1000
    cache.put(("long", 1), b"x" * 30_000)
    cache.put(("x" * 30_000, 1), b"")
    assert cache.get(("long", 1)) is None and len(cache) == 12


def test_a_cache_of_no_entries_or_no_bytes_keeps_nothing() -> None:
    for cache in (Cache(0, 1000), Cache(1000, 0)):
        cache.put(("query", 1), b"answer")
        assert cache.get(("query", 1)) is None and cache.bytes == 0


def test_the_cache_is_bounded_and_knows_the_topk() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, cache_size=2)
        for query, topk in [("a", 1), ("a", 1), ("a", 2), ("b", 1), ("a", 1), ("b", 1)]:
            assert await batcher.search([query], topk) == [hits(query, topk)]
        await batcher.close()

    asyncio.run(scenario())
    # The third and fourth drop (a, 1), the oldest; then it is asked for again.
    asked = [(queries[0], topk) for queries, topk in search.batches]
    assert asked == [("a", 1), ("a", 2), ("b", 1), ("a", 1)]


def test_a_lone_client_does_not_wait_for_a_batch() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_wait_ms=3.6e6)
        for number in range(5):
            await batcher.search([f"q{number}"], 1)
        await batcher.close()

    asyncio.run(scenario())


def test_clients_that_return_one_by_one_are_searched_together() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_wait_ms=5000)

        async def client(number: int) -> None:
            for turn in range(4):
                await batcher.search([f"client {number} turn {turn}"], 1)
                await asyncio.sleep(0.01 * number)

        await asyncio.gather(*(client(number) for number in range(6)))
        await batcher.close()

    asyncio.run(scenario())
    # The last ones end at different times, so only the first turns are sure to be whole.
    assert [len(queries) for queries, _ in search.batches][:4] == [6, 6, 6, 6]


def test_waiting_for_a_batch_is_bounded() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_wait_ms=50)
        await batcher.search(["a", "b"], 1)  # two at once: the next one waits for more
        await asyncio.wait_for(batcher.search(["c"], 1), 300)
        await batcher.close()

    asyncio.run(scenario())
    assert [queries for queries, _ in search.batches] == [["a", "b"], ["c"]]
