"""The batcher: what arrives together is searched together, and nothing accepted is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sg_rlhf.retrieval.batching import Batcher, QueueFull
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
        batcher.close()

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
        batcher.close()

    asyncio.run(scenario())
    # Duplicates are searched once.
    assert [len(queries) for queries, _ in search.batches] == [64, 64, 22]


def test_each_topk_is_searched_by_itself() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search)
        requests = [batcher.search(["same"], topk) for topk in (1, 5, 3, 5)]
        assert await asyncio.gather(*requests) == [[hits("same", k)] for k in (1, 5, 3, 5)]
        batcher.close()

    asyncio.run(scenario())
    assert sorted(topk for _, topk in search.batches) == [1, 3, 5]


def test_a_full_queue_refuses_at_once_and_whole_requests() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_pending=10)
        search.gate.clear()
        accepted = asyncio.create_task(batcher.search([f"a{i}" for i in range(8)], 1))
        await until(lambda: search.batches)
        with pytest.raises(QueueFull, match="8 queries are waiting, no room for 3 more"):
            await asyncio.wait_for(batcher.search(["b1", "b2", "b3"], 1), 300)
        # The refused request left nothing behind, and what is under way may be joined.
        more = asyncio.create_task(batcher.search(["b1", "b2", "a0"], 1))
        await asyncio.sleep(0)
        search.gate.set()
        assert len(await accepted) == 8
        assert await more == [hits(query, 1) for query in ("b1", "b2", "a0")]
        batcher.close()

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
        batcher.close()

    asyncio.run(scenario())


def test_an_idle_batcher_takes_more_than_may_wait() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_pending=10)
        queries = [f"q{i}" for i in range(25)]
        assert await batcher.search(queries, 1) == [hits(query, 1) for query in queries]
        batcher.close()

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
        batcher.close()

    asyncio.run(scenario())
    assert len(search.batches[1][0]) == 13


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
        batcher.close()

    asyncio.run(scenario())
    assert max(len(queries) for queries, _ in search.batches) > 32, "they were one batch"


def test_the_cache_is_bounded_and_knows_the_topk() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, cache_size=2)
        for query, topk in [("a", 1), ("a", 1), ("a", 2), ("b", 1), ("a", 1), ("b", 1)]:
            assert await batcher.search([query], topk) == [hits(query, topk)]
        batcher.close()

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
        batcher.close()

    asyncio.run(scenario())


def test_after_a_batch_of_several_the_next_one_waits_for_others() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, max_wait_ms=500)
        await batcher.search(["a", "b"], 1)
        first = asyncio.create_task(batcher.search(["c"], 1))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, batcher.search(["d"], 1))
        batcher.close()

    asyncio.run(scenario())
    assert [queries for queries, _ in search.batches] == [["a", "b"], ["c", "d"]]


def test_without_a_cache_each_query_is_searched_again() -> None:
    search = Search()

    async def scenario() -> None:
        batcher = make(search, cache_size=0)
        for _ in range(2):
            assert await batcher.search(["a"], 1) == [hits("a", 1)]
        batcher.close()

    asyncio.run(scenario())
    assert len(search.batches) == 2
