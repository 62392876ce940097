"""The retriever's client: it batches the queries of many dialogues and waits for an outage to end.

Speaks the contract of Search-R1's server: POST `{"queries": [...], "topk": 3, "return_scores":
true}` gives `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each
query; `id` and `score` may be missing. Any other answer is an error, never an empty result.

A query is sent at once while fewer than `max_connections` requests are in flight. Otherwise it is
sent with all other waiting queries when one of them ends. Equal queries are sent once.

| what happened                            | several queries of a request   | then         |
|------------------------------------------|--------------------------------|--------------|
| no connection, 429, 502, 503, 504        | stay together                  | sent again   |
| no answer within `timeout_s`             | are halved                     | sent again   |
| 408, 425, 500 and other 5xx              | are halved, if it occurs twice | sent again   |
| 400, 413, 422, another number of results | are halved                     | one fails    |
| another status, or not this shape        | fail                           |              |
| one query's results are malformed        | this query fails               |              |

A request is sent again by one rule (`retry`): up to `retries` times, and longer while the retriever
has been away for less than `outage_s`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sg_rlhf.common.text import notice_if_slow
from sg_rlhf.tasks.search.protocol import Passage
from sg_rlhf.tasks.search.retriever.retry import (
    Cause,
    OutageClock,
    RequestError,
    RetryPolicy,
    error_of_status,
)
from sg_rlhf.tasks.search.settings import SearchSettings

if TYPE_CHECKING:
    import aiohttp

#: Queries of a request before it is known how long the retriever takes.
FIRST_BATCH = 8
#: A request is made no larger than what is answered in this share of its time-out.
AIMED_SHARE = 0.25
_SHOWN = 200


class RetrieverError(Exception):
    """The retriever gave no usable answer; one line that names the address and the cause."""


_Result = list[Passage] | RetrieverError


class RetrieverClient:
    """Asks one retriever; to be used within one event loop, and closed at the end.

    `timeout_s` of the settings limits one request, from the connection to the whole answer; waiting
    for one of the `max_connections` is not limited. A request begins with few queries, and stays
    with what a slow retriever answers in a quarter of `timeout_s`, at most `max_batch`.

    Args:
        settings: `sg.search.*`.
        outage_s: used instead of the settings' own.
        notify: called with a line when an outage is noticed and when it ends.
        rng: draws the waits between requests.
    """

    def __init__(
        self,
        settings: SearchSettings,
        *,
        outage_s: float | None = None,
        notify: Callable[[str], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self._rng = rng or random.Random()
        self._clock = OutageClock(
            settings.outage_s if outage_s is None else outage_s,
            lambda line: (notify or _print)(f"retriever {settings.url}: {line}"),
        )
        self._batch = min(FIRST_BATCH, settings.max_batch)
        #: Queries that are not sent yet, and the results that dialogues wait for.
        self._queue: deque[str] = deque()
        self._pending: dict[str, asyncio.Future[_Result]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._sending = False
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections; whoever still waits gets an error."""
        self._queue.clear()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        left = list(self._pending)
        self._resolve(left, [self._error("closed")] * len(left))
        if self._session is not None:
            await self._session.close()

    async def search(self, query: str) -> list[Passage]:
        """Passages for one query, best first; an empty list where the server found none.

        Raises:
            RetrieverError: no usable answer after all retries.
        """
        answer = self._pending.get(query)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._pending[query] = loop.create_future()
            self._queue.append(query)
            if not self._sending:
                self._sending = True
                loop.call_soon(self._send)  # with what else is asked in this turn of the loop
        # Whoever is cancelled must not take the answer from the others.
        found = await asyncio.shield(answer)
        if isinstance(found, RetrieverError):
            raise RetrieverError(*found.args)
        return list(found)

    def _send(self) -> None:
        """Start requests until all are under way, or as many as there may be."""
        self._sending = False
        while self._queue and len(self._requests) < self.settings.max_connections:
            size = min(self._batch, len(self._queue))
            queries = [self._queue.popleft() for _ in range(size)]
            request = asyncio.create_task(self._answer(queries))
            self._requests.add(request)
            request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._send()

    async def _answer(self, queries: list[str]) -> None:
        """Ask for some queries, and give each answer to whoever wants it."""
        try:
            found = await self._fetch(queries, self._retry_policy())
        except Exception as error:  # a mistake of ours: nobody must wait for ever
            found = [self._error(repr(error))] * len(queries)
        self._resolve(queries, found)

    def _resolve(self, queries: Iterable[str], found: Iterable[_Result]) -> None:
        for query, result in zip(queries, found, strict=True):
            answer = self._pending.pop(query)
            if not answer.done():  # its loop may have been closed
                answer.set_result(result)

    async def _fetch(self, queries: list[str], policy: RetryPolicy) -> list[_Result]:
        """The result of each query, after as many requests as the policy allows."""
        while True:
            try:
                return self._read(await self._post(queries), queries)
            except RequestError as error:
                seconds = policy.wait(error)
                if len(queries) > 1 and policy.should_split(error):
                    return await self._fetch_in_halves(queries, error, policy)
                if seconds is None:
                    times = f", {policy.failures} times" if policy.failures else ""
                    return [self._error(f"{error}{times}")] * len(queries)
            await asyncio.sleep(seconds)

    async def _fetch_in_halves(
        self, queries: list[str], error: RequestError, policy: RetryPolicy
    ) -> list[_Result]:
        middle = len(queries) // 2
        found: list[_Result] = []
        for half in (queries[:middle], queries[middle:]):
            if error.cause is not Cause.TIMEOUT:
                found += await self._fetch(half, self._retry_policy())
            elif policy.exhausted:
                found += found[-1:] * len(half)
            else:  # one policy for both: a retriever that hangs does so for each of them
                found += await self._fetch(half, policy)
        return found

    async def _post(self, queries: Sequence[str]) -> Any:
        """One request; its answer as JSON."""
        # Of the extra `search`: suites are listed, and other ones evaluated, without it.
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.settings.max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s),
            )
        body = {"queries": queries, "topk": self.settings.topk, "return_scores": True}
        started = time.monotonic()
        try:
            async with self._session.post(
                self.settings.url, data=json.dumps(body).encode(), allow_redirects=False
            ) as response:
                answer = await response.read()
        except TimeoutError:
            self._batch = max(1, min(self._batch, len(queries) // 2))
            raise RequestError(
                Cause.TIMEOUT, f"no answer within {self.settings.timeout_s:g} s"
            ) from None
        except aiohttp.ClientError as error:
            raise RequestError(
                Cause.AWAY, f"no connection ({error or type(error).__name__})"
            ) from None
        if response.status in (429, 503):
            self._batch = max(1, self._batch // 2)
        if not response.ok:
            shown = f"status {response.status}: {_short(answer.decode(errors='replace'))}"
            failure = error_of_status(response.status, shown, response.headers.get("Retry-After"))
            if not failure.cause.is_temporary:
                self._clock.answered()
            raise failure
        self._clock.answered()
        self._adapt_batch(len(queries), time.monotonic() - started)
        try:
            return json.loads(answer)
        except ValueError:
            shown = f"not JSON: {_short(answer.decode(errors='replace'))}"
            raise RequestError(Cause.BAD_ANSWER, shown) from None

    def _adapt_batch(self, queries: int, seconds: float) -> None:
        """Let the next request have more or fewer queries, by how long this one took."""
        fits = int(queries * AIMED_SHARE * self.settings.timeout_s / max(seconds, 1e-6))
        if fits < queries:
            self._batch = max(1, fits)
        elif queries >= self._batch:
            self._batch = min(2 * queries, fits, self.settings.max_batch)

    def _read(self, answer: Any, queries: Sequence[str]) -> list[_Result]:
        """What an answer holds for each query; a query whose part is malformed fails alone."""
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list):
            raise RequestError(Cause.BAD_ANSWER, f"an answer of another shape: {_short(answer)}")
        if len(result) != len(queries):
            counts = f"{len(result)} results for {len(queries)} queries"
            raise RequestError(Cause.BAD_QUERY, counts)
        found: list[_Result] = []
        for entries in result:
            try:
                found.append([_passage(entry) for entry in entries])
            except (KeyError, TypeError, ValueError) as error:
                shown = f"an answer of another shape ({error!r}): {_short(entries)}"
                found.append(self._error(shown))
        return found

    def _retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self._clock, self.settings.retries, self.settings.backoff_s, self._rng)

    def _error(self, message: str) -> RetrieverError:
        return RetrieverError(f"retriever {self.settings.url}: {message}")


def waiting_for(settings: SearchSettings) -> str:
    """The retriever and how long a request may take."""
    return (
        f"the retriever {settings.url} (up to {settings.timeout_s:g} s a request, "
        f"{settings.retries + 1} requests)"
    )


def check(settings: SearchSettings) -> None:
    """Ask the search engine of a recipe one question, before Ray starts.

    Raises:
        ValueError: it does not answer; says how to start one.
    """
    client = RetrieverClient(settings, outage_s=0.0)

    async def ask() -> None:
        try:
            await client.search("Is anybody there?")
        finally:
            await client.aclose()

    try:
        with notice_if_slow(f"waiting for {waiting_for(settings)}"):
            asyncio.run(ask())
    except RetrieverError as error:
        raise ValueError(
            f"{error}; start one with `python -m sg_rlhf.retrieval.server --index DIR`, "
            "or set sg.search.url"
        ) from None


def _passage(entry: Any) -> Passage:
    document, score = entry["document"], entry.get("score")
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents {_short(contents)}")
    # Search-R1's servers before a web search send neither.
    return Passage.from_contents(
        str(document.get("id", "")), contents, None if score is None else float(score)
    )


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
