"""The retriever's client against a real HTTP server: contract, retries, time-outs, bad answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from sg_rlhf.common import text
from sg_rlhf.tasks.rollout import EnvironmentFailed
from sg_rlhf.tasks.search.environment import SearchEnvironment
from sg_rlhf.tasks.search.limits import Limits
from sg_rlhf.tasks.search.protocol import Passage
from sg_rlhf.tasks.search.retriever.client import RetrieverClient, RetrieverError, check
from sg_rlhf.tasks.search.settings import SearchSettings
from tests.unit.tasks.search.http_retriever import Reply, Retriever, found, passages, running


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with running() as server:
        yield server


def client_of(url: str, topk: int = 3, **limits: Any) -> RetrieverClient:
    chosen = {"backoff_s": 0.001, "timeout_s": 60.0, "outage_s": 0.0, **limits}
    return RetrieverClient(SearchSettings(url=url, topk=topk), limits=Limits(**chosen))


def ask(url: str, *queries: str, **settings: Any) -> list[list[Passage]]:
    async def run() -> list[list[Passage]]:
        client = client_of(url, **settings)
        try:
            return await asyncio.gather(*map(client.search, queries))
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
    retriever.delay_s = 3600.0
    with pytest.raises(RetrieverError, match="no answer within 0.1 s, 2 times"):
        ask(retriever.url, "q", timeout_s=0.1, retries=1)


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
        {"result": [[{"document": {"id": "1", "contents": "c"}, "score": "high"}]]},
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


@pytest.mark.parametrize("score", [{}, {"score": None}, {"score": 0.5}])
def test_neither_score_nor_id_is_needed(retriever: Retriever, score: dict[str, Any]) -> None:
    """Search-R1's servers before Google and SERP send neither."""
    entry = {"document": {"contents": '"T"\ntext'}, **score}
    retriever.reply = lambda body: (200, {"result": [[entry]]})
    assert ask(retriever.url, "q") == [[Passage("", '"T"', "text", score.get("score"))]]


async def ask_all(client: RetrieverClient, queries: Iterable[str]) -> list[Any]:
    """Passages or the error of each query, asked by as many tasks at once."""
    return await asyncio.gather(*map(client.search, queries), return_exceptions=True)


def together(url: str, queries: Iterable[str], **settings: Any) -> list[Any]:
    async def run() -> list[Any]:
        client = client_of(url, **settings)
        try:
            return await ask_all(client, queries)
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_queries_are_gathered_in_few_bounded_requests(retriever: Retriever) -> None:
    retriever.delay_s = 0.01
    queries = [f"query {i}" for i in range(500)]
    results = together(retriever.url, queries, max_connections=3, max_batch=32)
    assert [passages[0].title for passages in results] == [f'"About {q}"' for q in queries]
    sizes = [len(body["queries"]) for body in retriever.requests]
    assert sum(sizes) == 500 and max(sizes) == 32 and len(sizes) < 25
    assert len(retriever.connections) <= 3


def test_a_lone_query_is_a_request(retriever: Retriever) -> None:
    for i in range(20):
        ask(retriever.url, f"query {i}")
    assert [len(body["queries"]) for body in retriever.requests] == [1] * 20


def held(retriever: Retriever) -> threading.Event:
    """The retriever answers nothing before this is set."""
    answer = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        assert answer.wait(300)
        return found(body)

    retriever.reply = reply
    return answer


async def asked_once(retriever: Retriever) -> None:
    while not retriever.requests:
        await asyncio.sleep(0.01)


def test_the_same_query_is_sent_once(retriever: Retriever) -> None:
    answer = held(retriever)

    async def run() -> list[Any]:
        client = client_of(retriever.url)
        first = asyncio.create_task(ask_all(client, ["a"] * 30 + ["b"] * 30))
        await asked_once(retriever)
        second = asyncio.create_task(ask_all(client, ["a", "b"]))
        await asyncio.sleep(0.05)  # it has joined them
        answer.set()
        later, found = await second, await first
        found[0].clear()  # each has a list of its own
        assert found[1] == later[0] != found[0]
        await client.search("a")  # answered, so it is asked anew
        await client.aclose()
        return found

    assert len(asyncio.run(run())) == 60
    assert [body["queries"] for body in retriever.requests] == [["a", "b"], ["a"]]


def one_bad(status: int) -> Callable[[dict[str, Any]], Reply]:
    def reply(body: dict[str, Any]) -> Reply:
        return (status, b"a bad query") if "bad" in body["queries"] else found(body)

    return reply


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_one_bad_query_does_not_fail_the_others(retriever: Retriever, status: int) -> None:
    retriever.reply = one_bad(status)
    queries = [*(f"query {i}" for i in range(31)), "bad"]
    results = together(retriever.url, queries, retries=1, max_connections=1)
    assert all(len(passages) == 3 for passages in results[:31])
    assert f"status {status}: a bad query" in str(results[31])
    asked = [len(body["queries"]) for body in retriever.requests]
    assert asked == [32] + [1] * (33 if status == 500 else 32)


def test_malformed_results_fail_their_query_alone(retriever: Retriever) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        status, answer = found(body)
        if "c" in body["queries"]:
            answer["result"][-1] = [{"document": {"id": "1"}}]
        return status, answer

    retriever.reply = reply
    results = together(retriever.url, ["a", "b", "c", "d"])
    assert [isinstance(result, RetrieverError) for result in results] == [False, False, True, False]


def test_another_number_of_results_is_no_answer_to_any(retriever: Retriever) -> None:
    """Which result would be whose? One query at a time there is no doubt."""

    def reply(body: dict[str, Any]) -> Reply:
        return 200, {"result": [passages(f'"{q}"\nx') for q in body["queries"] if q != "lost"]}

    retriever.reply = reply
    results = together(retriever.url, ["a", "lost", "b", "c"])
    assert [r[0].title for r in results if isinstance(r, list)] == ['"a"', '"b"', '"c"']
    assert "0 results for 1 queries" in str(results[1])


def test_whoever_gives_up_takes_nothing_from_the_others(retriever: Retriever) -> None:
    retriever.delay_s = 0.1

    async def run() -> None:
        client = client_of(retriever.url)
        tasks = [asyncio.create_task(client.search("same")) for _ in range(3)]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        assert len(await tasks[1]) == len(await tasks[2]) == 3
        await client.aclose()

    asyncio.run(run())


def test_closing_ends_what_waits(retriever: Retriever) -> None:
    answer = held(retriever)

    async def run() -> list[Any]:
        client = client_of(retriever.url, max_connections=1)
        asked = asyncio.create_task(ask_all(client, [f"query {i}" for i in range(40)]))
        await asked_once(retriever)
        await client.aclose()
        answer.set()
        return await asked

    assert {str(error) for error in asyncio.run(run())} == {f"retriever {retriever.url}: closed"}
    assert len(retriever.requests) == 1


def test_waiting_for_a_connection_is_no_time_out(retriever: Retriever) -> None:
    retriever.delay_s = 0.6
    queries = [f"query {i}" for i in range(10)]
    settings = {"max_connections": 1, "max_batch": 1, "timeout_s": 5.0, "retries": 0}
    # 6 s in all, more than one request may take.
    assert all(len(passages) == 3 for passages in together(retriever.url, queries, **settings))


def test_the_failure_rate_stops_only_above_its_limit_and_with_enough_searches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(max_failure_rate=0.25, failure_window=8, min_searches=4)
    environment = SearchEnvironment(SearchSettings(), limits=limits)

    async def search(query: str) -> list[Passage]:
        if query == "bad":
            raise RetrieverError("down")
        return []

    monkeypatch.setattr(environment.client, "search", search)

    async def run() -> None:
        for query in ("bad", "bad", "bad"):  # too few searches
            assert await environment.search(query) is None
        with pytest.raises(EnvironmentFailed, match="4 of the last 4 searches"):
            await environment.search("bad")
        for query in ("good",) * 7 + ("bad",):
            await environment.search(query)
        # The window holds the last 8: two failures are a quarter, the limit itself.
        assert await environment.search("bad") is None
        with pytest.raises(EnvironmentFailed, match="3 of the last 8 searches"):
            await environment.search("bad")

    asyncio.run(run())


def test_a_run_says_that_it_waits_for_a_retriever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "SLOW_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve"
        with pytest.raises(ValueError, match="start one with"):
            check(SearchSettings(url=url), Limits(timeout_s=0.5, retries=0))
    assert capsys.readouterr().err == (
        f"waiting for the retriever {url} (up to 0.5 s a request, 1 requests) ...\n"
    )
