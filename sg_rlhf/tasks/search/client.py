"""The retriever's client: pooled, with time-outs and bounded retries.

Speaks the contract of Search-R1's server: POST `{"queries": [...], "topk": 3, "return_scores":
true}` gives `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each
query. Any other answer is an error: no result is ever taken for an empty one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import httpx

from sg_rlhf.tasks.search.dialogue import SearchFailed
from sg_rlhf.tasks.search.protocol import Passage
from sg_rlhf.tasks.search.settings import SearchSettings

#: Answers that mean "later": too many requests, and a server that is starting or overloaded.
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
#: The longest wait between two requests, in seconds.
MAX_BACKOFF_S = 10.0
_SHOWN = 200


class RetrieverError(SearchFailed):
    """The retriever gave no usable answer; one line that names the address and the cause."""


class RetrieverClient:
    """Asks one retriever; to be used within one event loop, and closed at the end.

    Args:
        url: where queries are posted, with the path.
        topk: passages for each query.
        timeout_s: of one request, from a free connection to the whole answer; waiting for a
            free connection is not limited, since it means only that many rollouts search at once.
        retries: further requests after one that failed. A request that the server refuses as
            wrong (status 4xx) is not repeated.
        backoff_s: the n-th wait is drawn evenly from 0 to backoff_s * 2^n seconds ("full jitter"),
            at most 10 s, so that many rollouts do not return at the same moment.
        max_connections: open at once; more searches wait for a free one.
        rng: draws the waits.
    """

    def __init__(
        self,
        url: str,
        *,
        topk: int = 3,
        timeout_s: float = 10.0,
        retries: int = 3,
        backoff_s: float = 0.25,
        max_connections: int = 64,
        rng: random.Random | None = None,
    ) -> None:
        self.url = url
        self.topk = topk
        self.timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._rng = rng or random.Random()
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            trust_env=False,  # a proxy for the internet is none for the machine next door
        )

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> RetrieverClient:
        """The client that a recipe's `sg.search.*` describes."""
        return cls(
            settings.url,
            topk=settings.topk,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            backoff_s=settings.backoff_s,
            max_connections=settings.max_connections,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def search(self, query: str) -> list[Passage]:
        """Passages for one query, best first; an empty list where the server found none.

        Raises:
            RetrieverError: no usable answer after all retries.
        """
        return (await self.search_many([query]))[0]

    async def search_many(self, queries: Sequence[str]) -> list[list[Passage]]:
        """Passages for each query, in one request.

        Raises:
            RetrieverError: no usable answer after all retries.
        """
        body = {"queries": list(queries), "topk": self.topk, "return_scores": True}
        answer = await self._post(body)
        try:
            found = [[_passage(entry) for entry in entries] for entries in answer["result"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._error(f"an answer of another shape ({error!r}): {_short(answer)}") from None
        if len(found) != len(queries):
            raise self._error(f"{len(found)} results for {len(queries)} queries")
        return found

    async def _post(self, body: dict[str, Any]) -> Any:
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                limit = min(self._backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S)
                await asyncio.sleep(self._rng.uniform(0.0, limit))
            try:
                response = await self._http.post(self.url, json=body)
            except httpx.TimeoutException:
                problem = f"no answer within {self.timeout_s:g} s"
                continue
            except httpx.TransportError as error:
                problem = f"no connection ({error or type(error).__name__})"
                continue
            if response.is_success:
                try:
                    return response.json()
                except ValueError:
                    raise self._error(f"not JSON: {_short(response.text)}") from None
            problem = f"status {response.status_code}: {_short(response.text)}"
            if response.status_code not in RETRIED_STATUS:
                raise self._error(problem)
        raise self._error(f"{problem}, {self._retries + 1} times")

    def _error(self, problem: str) -> RetrieverError:
        return RetrieverError(f"retriever {self.url}: {problem}")


def check(settings: SearchSettings) -> None:
    """Ask the search engine of a recipe one question, before Ray starts.

    Raises:
        ValueError: it does not answer; says how to start one.
    """
    client = RetrieverClient.from_settings(settings)

    async def ask() -> None:
        try:
            await client.search("Is anybody there?")
        finally:
            await client.aclose()

    try:
        asyncio.run(ask())
    except RetrieverError as error:
        raise ValueError(
            f"{error}; start one with `python -m sg_rlhf.retrieval.server --index DIR`, "
            "or set sg.search.url"
        ) from None


class FailureRate:
    """The share of failed searches among the latest ones, and whether it is too high.

    Args:
        limit: the share above which `too_high` is true.
        window: how many searches are looked back on.
        minimum: searches before the share counts for anything.
    """

    def __init__(self, limit: float, window: int, minimum: int) -> None:
        self.limit = limit
        self._minimum = minimum
        self._failed: deque[bool] = deque(maxlen=window)
        self.last_problem = ""

    def add(self, problem: str | None) -> None:
        """Count one search; None: it succeeded."""
        self._failed.append(problem is not None)
        if problem is not None:
            self.last_problem = problem

    @property
    def searches(self) -> int:
        """Searches that are looked back on now."""
        return len(self._failed)

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return sum(self._failed)

    @property
    def too_high(self) -> bool:
        """Whether the run should stop."""
        return self.searches >= self._minimum and self.failed > self.limit * self.searches


def _passage(entry: Any) -> Passage:
    document, score = entry["document"], float(entry["score"])
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents {_short(contents)}")
    return Passage.from_contents(str(document.get("id", "")), contents, score)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
