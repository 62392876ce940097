"""The retriever's client against a real HTTP server: contract, retries, time-outs, bad answers."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.tasks.search.client import FailureRate, RetrieverClient, RetrieverError
from sg_rlhf.tasks.search.protocol import Passage
from tests.unit.tasks.search.http_retriever import Reply, Retriever, found, passages, running


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with running() as server:
        yield server


def ask(url: str, *queries: str, **settings: Any) -> list[list[Passage]]:
    async def run() -> list[list[Passage]]:
        client = RetrieverClient(url, **{"backoff_s": 0.001, "timeout_s": 5.0, **settings})
        try:
            return await client.search_many(queries)
        finally:
            await client.aclose()

    return asyncio.run(run())


def answers(*replies: Reply | Callable[[dict[str, Any]], Reply]) -> Callable[[Any], Reply]:
    """The given replies one after the other; the last one from then on."""
    left = list(replies)

    def reply(body: dict[str, Any]) -> Reply:
        current = left.pop(0) if len(left) > 1 else left[0]
        return current(body) if callable(current) else current

    return reply


def test_the_request_and_the_answer_are_those_of_the_contract(retriever: Retriever) -> None:
    result = ask(retriever.url, "Ada Lovelace", "Zürich", topk=2)
    assert retriever.requests == [
        {"queries": ["Ada Lovelace", "Zürich"], "topk": 2, "return_scores": True}
    ]
    assert result[1] == [
        Passage("0", '"About Zürich"', "Fact 0 on Zürich.", 1.0),
        Passage("1", '"About Zürich"', "Fact 1 on Zürich.", 0.9),
    ]


def test_no_passage_is_an_answer(retriever: Retriever) -> None:
    retriever.reply = lambda body: (200, {"result": [[]]})
    assert ask(retriever.url, "q") == [[]]


def test_a_passage_without_a_text_behind_its_title(retriever: Retriever) -> None:
    retriever.reply = lambda body: (200, {"result": [passages('"Title alone"')]})
    assert ask(retriever.url, "q") == [[Passage("0", '"Title alone"', "", 1.0)]]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_is_busy_is_asked_again(retriever: Retriever, status: int) -> None:
    retriever.reply = answers((status, b"busy"), (status, b"busy"), found)
    assert len(ask(retriever.url, "q", retries=2)[0]) == 3
    assert len(retriever.requests) == 3


def test_retries_are_bounded_and_the_error_names_the_cause(retriever: Retriever) -> None:
    retriever.reply = lambda body: (503, b"the index is loading")
    with pytest.raises(RetrieverError) as error:
        ask(retriever.url, "q", retries=2)
    assert len(retriever.requests) == 3
    assert str(error.value) == (
        f"retriever {retriever.url}: status 503: the index is loading, 3 times"
    )


def test_a_request_that_is_refused_is_not_repeated(retriever: Retriever) -> None:
    retriever.reply = lambda body: (422, b"topk must be at most 100")
    with pytest.raises(RetrieverError, match="status 422: topk must be at most 100"):
        ask(retriever.url, "q", retries=5)
    assert len(retriever.requests) == 1


def test_a_slow_server_times_out(retriever: Retriever) -> None:
    retriever.delay_s = 1.0
    started = time.monotonic()
    with pytest.raises(RetrieverError, match="no answer within 0.1 s, 2 times"):
        ask(retriever.url, "q", timeout_s=0.1, retries=1)
    assert time.monotonic() - started < 0.9


def test_no_server_at_all() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/retrieve"
    with pytest.raises(RetrieverError, match="no connection .*2 times"):
        ask(url, "q", retries=1)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>not the retriever</html>",
        {},
        [],
        {"result": None},
        {"result": []},
        {"result": [[], []]},
        {"result": [[{"contents": "no document", "score": 1.0}]]},
        {"result": [[{"document": {"id": "1"}, "score": 1.0}]]},
        {"result": [[{"document": {"id": "1", "contents": None}, "score": 1.0}]]},
        {"result": [[{"document": {"id": "1", "contents": "no score"}}]]},
        {"result": [["text"]]},
    ],
)
def test_an_answer_of_another_shape_is_an_error_not_an_empty_result(
    retriever: Retriever, answer: Any
) -> None:
    retriever.reply = lambda body: (200, answer)
    with pytest.raises(RetrieverError) as error:
        ask(retriever.url, "q", retries=3)
    assert "\n" not in str(error.value)
    assert retriever.url in str(error.value)
    assert len(retriever.requests) == 1


def test_connections_are_pooled_and_bounded(retriever: Retriever) -> None:
    async def run() -> None:
        client = RetrieverClient(retriever.url, max_connections=3, timeout_s=5.0)
        for _ in range(4):
            await asyncio.gather(*(client.search(f"query {i}") for i in range(25)))
        await client.aclose()

    asyncio.run(run())
    assert len(retriever.requests) == 100
    assert len(retriever.connections) <= 3


def test_waiting_for_a_connection_is_no_time_out(retriever: Retriever) -> None:
    retriever.delay_s = 0.1

    async def run() -> list[list[Passage]]:
        client = RetrieverClient(retriever.url, max_connections=1, timeout_s=0.5, retries=0)
        results = await asyncio.gather(*(client.search(f"query {i}") for i in range(8)))
        await client.aclose()
        return list(results)

    assert len(asyncio.run(run())) == 8  # 0.8 s in all, more than one request may take


def test_waits_grow_and_have_jitter(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever.reply = lambda body: (503, b"")
    waits: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("sg_rlhf.tasks.search.client.asyncio.sleep", sleep)
    for seed in range(20):
        with pytest.raises(RetrieverError):
            ask(retriever.url, "q", retries=8, backoff_s=0.5, rng=random.Random(seed))
    by_attempt = [waits[i::8] for i in range(8)]
    limits = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    for drawn, limit in zip(by_attempt, limits, strict=True):
        assert min(drawn) >= 0.0 and max(drawn) <= limit
        assert max(drawn) > 0.7 * limit and len(set(drawn)) == 20


def test_the_failure_rate_stops_only_above_its_limit_and_with_enough_searches() -> None:
    rate = FailureRate(limit=0.25, window=8, minimum=4)
    for _ in range(3):
        rate.add("down")
        assert not rate.too_high  # too few searches
    rate.add(None)
    assert rate.too_high and (rate.failed, rate.searches) == (3, 4)
    for _ in range(6):
        rate.add(None)
    # The window holds the last 8: two failures are a quarter, the limit itself.
    rate.add("down")
    rate.add("down again")
    assert (rate.failed, rate.searches, rate.too_high) == (2, 8, False)
    assert rate.last_problem == "down again"
    rate.add("down")
    assert rate.too_high


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20), st.integers(0, 15))
def test_the_failure_rate_is_that_of_the_last_searches(
    failures: list[bool], window: int, sixteenths: int
) -> None:
    rate = FailureRate(sixteenths / 16, window, minimum=1)
    for failed in failures:
        rate.add("down" if failed else None)
    seen = failures[-window:]
    assert (rate.failed, rate.searches) == (sum(seen), len(seen))
    assert rate.too_high == (16 * sum(seen) > sixteenths * len(seen))
