"""The retriever's client: it batches the queries of many dialogues and waits for an outage to end.

It speaks Search-R1's contract; docs/search.md has it, and says what is sent again. A query is sent
at once while fewer than `max_connections` requests are in flight, otherwise with all other waiting
queries when one of them ends. An answer of another shape is an error, never an empty result.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sg_rlhf.common.text import notice_if_slow
from sg_rlhf.tasks.search.limits import LIMITS, Limits
from sg_rlhf.tasks.search.protocol import Passage
from sg_rlhf.tasks.search.settings import SearchSettings

if TYPE_CHECKING:
    import aiohttp
    from tenacity import RetryCallState

#: Maximum seconds between two requests; the end of an outage is noticed this late at most.
MAX_BACKOFF_S = 2.0
#: An outage is reported after this many seconds. A server that sheds load is away for less.
REPORTED_AFTER_S = 1.0
#: Statuses that no query causes: the server is not there, or asks to come back later.
_AWAY = frozenset({408, 425, 429, 502, 503, 504})
#: Characters of an answer that an error shows.
_SHOWN = 200


class RetrieverError(Exception):
    """The retriever gave no usable answer; one line that names the address and the cause."""


class _FailedRequest(Exception):
    """A request has no usable answer; `status` is HTTP's, or 503 without a connection."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


_Result = list[Passage] | RetrieverError


class RetrieverClient:
    """Asks one retriever, within one event loop; equal queries are sent once.

    `notify` is called with a line when an outage is noticed and when it ends.
    """

    def __init__(
        self,
        settings: SearchSettings,
        *,
        limits: Limits = LIMITS,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self._notify = notify or (lambda line: print(line, file=sys.stderr, flush=True))
        self._is_away = False  # which has been reported
        #: Queries that are not sent yet, and the results that dialogues wait for.
        self._queue: deque[str] = deque()
        self._pending: dict[str, asyncio.Future[_Result]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(limits.max_connections)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections; whoever still waits gets an error."""
        self._queue.clear()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        for query in list(self._pending):
            self._resolve(query, self._error("closed"))
        if self._session is not None:
            await self._session.close()

    async def search(self, query: str) -> list[Passage]:
        """Passages for one query, best first; RetrieverError without a usable answer."""
        answer = self._pending.get(query)
        if answer is None:
            answer = self._pending[query] = asyncio.get_running_loop().create_future()
            self._queue.append(query)
            # It starts after all that is asked in this turn of the event loop.
            request = asyncio.create_task(self._send())
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
        # Whoever is cancelled must not take the answer from the others.
        found = await asyncio.shield(answer)
        if isinstance(found, RetrieverError):
            raise RetrieverError(*found.args)
        return list(found)

    async def _send(self) -> None:
        """Ask for the oldest queries, and give each answer to whoever waits for it."""
        async with self._slots:
            size = min(self.limits.max_batch, len(self._queue))
            queries = [self._queue.popleft() for _ in range(size)]
            if not queries:  # another request has them
                return
            try:
                found = await self._fetch(queries)
            except Exception as error:  # a mistake of ours: nobody must wait for ever
                found = [self._error(repr(error))] * len(queries)
        for query, result in zip(queries, found, strict=True):
            self._resolve(query, result)

    def _resolve(self, query: str, result: _Result) -> None:
        answer = self._pending.pop(query)
        if not answer.done():  # its loop may have been closed
            answer.set_result(result)

    async def _fetch(self, queries: list[str]) -> list[_Result]:
        """The result of each query, after as many requests as the limits allow."""
        import tenacity

        is_alone = len(queries) == 1

        def is_temporary(error: BaseException) -> bool:
            status = error.status if isinstance(error, _FailedRequest) else 0
            return status in _AWAY or (is_alone and status >= 500)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_temporary),
            wait=tenacity.wait_random_exponential(self.limits.backoff_s, max=MAX_BACKOFF_S),
            stop=tenacity.stop_after_attempt(self.limits.retries + 1)
            & tenacity.stop_after_delay(self.limits.outage_s),
            before_sleep=self._report,
            reraise=True,
        )
        try:
            return await retrying(self._request, queries)
        except _FailedRequest as error:
            if not is_alone and not is_temporary(error):  # one query may be the reason
                return [result for query in queries for result in await self._fetch([query])]
            times = retrying.statistics["attempt_number"]
            shown = f"{error}, {times} times" if is_temporary(error) else str(error)
            return [self._error(shown)] * len(queries)

    def _report(self, state: RetryCallState) -> None:
        """Say that a request waits for the retriever, once in an outage."""
        seconds, outcome = state.seconds_since_start or 0.0, state.outcome
        if self.limits.outage_s and not self._is_away and outcome and seconds >= REPORTED_AFTER_S:
            self._is_away = True
            waiting = f"; waiting for it, up to {self.limits.outage_s:g} s"
            self._notify(f"retriever {self.settings.url}: {outcome.exception()}{waiting}")

    async def _request(self, queries: Sequence[str]) -> list[_Result]:
        """One request; the result of each query."""
        # Of the extra `search`: suites are listed, and other ones evaluated, without it.
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self.limits.timeout_s),
            )
        body = {"queries": queries, "topk": self.settings.topk, "return_scores": True}
        try:
            async with self._session.post(
                self.settings.url, json=body, allow_redirects=False
            ) as response:
                content = await response.read()
        except TimeoutError:
            raise _FailedRequest(f"no answer within {self.limits.timeout_s:g} s", 503) from None
        except aiohttp.ClientError as error:
            reason = error or type(error).__name__
            raise _FailedRequest(f"no connection ({reason})", 503) from None
        text = _short(content.decode(errors="replace"))
        if not response.ok:
            raise _FailedRequest(f"status {response.status}: {text}", response.status)
        if self._is_away:
            self._is_away = False
            self._notify(f"retriever {self.settings.url}: answers again")
        try:
            result = json.loads(content)["result"]
            found: list[_Result] = [[_passage(entry) for entry in entries] for entries in result]
        except (KeyError, TypeError, ValueError) as error:
            raise _FailedRequest(f"an answer of another shape ({error!r}): {text}") from None
        if len(found) != len(queries):
            raise _FailedRequest(f"{len(found)} results for {len(queries)} queries")
        return found

    def _error(self, message: str) -> RetrieverError:
        return RetrieverError(f"retriever {self.settings.url}: {message}")


async def ask(
    settings: SearchSettings, *queries: str, limits: Limits = LIMITS
) -> list[list[Passage]]:
    """Ask at the start of a command, when no outage is waited for."""
    waiting = (
        f"waiting for the retriever {settings.url} (up to {limits.timeout_s:g} s a request, "
        f"{limits.retries + 1} requests)"
    )
    at_once = replace(limits, outage_s=0.0)
    with notice_if_slow(waiting):
        async with aclosing(RetrieverClient(settings, limits=at_once)) as client:
            return await asyncio.gather(*map(client.search, queries))


def check(settings: SearchSettings, limits: Limits = LIMITS) -> None:
    """Ask a recipe's search engine one question, before Ray starts; ValueError if it is away."""
    try:
        asyncio.run(ask(settings, "Is anybody there?", limits=limits))
    except RetrieverError as error:
        raise ValueError(
            f"{error}; start one with `sg-rlhf serve --index DIR`, or set sg.search.url"
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
