"""The HTTP side: a FastAPI application around a `Retriever`.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id", "contents"}, "score"}]]}     a list a query
                    {"result": [[{"id", "contents"}]]}                            without scores
    GET /health, /metrics (Prometheus), /docs (OpenAPI)

What a client did wrong is 4xx with the reason; too much at once is 429 with `Retry-After`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sg_rlhf.retrieval.batching import Batcher, Closing, Overloaded
from sg_rlhf.retrieval.body import Asked, Reader, Refused
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.metrics import Metrics
from sg_rlhf.retrieval.search import Hit, Retriever
from sg_rlhf.retrieval.turns import Turns

DESCRIPTION = "Passage retrieval with Search-R1's HTTP contract: see POST /retrieve."
#: Bytes of an answer that are handed over at once; a larger one lets others in between.
PIECE = 2**17
#: Seconds that handing it over takes.
SEND_SECONDS = 1e-4
#: A closing server gives requests that are on their way this many seconds to arrive.
LAST_SECONDS = 1.0


class Passage(BaseModel):
    """A passage of the corpus."""

    id: str
    contents: str = Field(description='"Title" in quotes, a newline, the text')


class ScoredPassage(BaseModel):
    """A passage with its score: BM25, or a cosine."""

    document: Passage
    score: float


class RetrieveResponse(BaseModel):
    """A list for each query, best first; shorter than topk where fewer passages match."""

    result: list[list[ScoredPassage]] | list[list[Passage]]


class Refusal(BaseModel):
    """Why a request was not served."""

    detail: str


class Problem(BaseModel):
    """What is wrong with a field of a request."""

    type: str
    loc: list[str | int]
    msg: str


class Problems(BaseModel):
    """What is wrong with a request."""

    detail: list[Problem]


class Health(BaseModel):
    """What is served."""

    status: str
    passages: int
    description: str


def create_app(
    load: Callable[[], Retriever], limits: Limits, turns: Turns | None = None
) -> FastAPI:
    """The application; `load` is called when it starts.

    `turns` are those in which the server parses, if it has any.

    It is stateless but for its cache, so any number of them may serve one index. `app.state.close`
    tells it that the server is shutting down: it waits no longer for bodies.
    `app.state.is_searching` says whether a search runs, `app.state.count` counts a request by its
    status.
    """
    metrics = Metrics()
    turns = turns or Turns()
    reader = Reader(limits, turns)
    arrivals = Arrivals(limits.receive_seconds)
    state: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        retriever = state["retriever"] = load()
        # What is loaded by now stays, and would be looked through by each full collection of
        # garbage: 150 ms in which nobody is answered.
        gc.collect()
        gc.freeze()

        def search(queries: Sequence[str], options: Any) -> list[bytes]:
            topk, with_scores = options
            return [encode(hits, with_scores) for hits in retriever.search(queries, topk)]

        batcher = state["batcher"] = Batcher(
            search,
            metrics,
            turns,
            max_batch=limits.max_batch,
            max_wait=limits.max_wait_ms / 1e3,
            max_pending=limits.max_pending,
            cache_size=limits.cache_size,
            cache_bytes=limits.cache_mb * 2**20,
        )
        yield
        await batcher.close()

    app = FastAPI(title="sg_rlhf retrieval", description=DESCRIPTION, lifespan=lifespan)
    app.state.close = arrivals.close
    app.state.count = lambda status: metrics.requests.labels(str(status)).inc()
    app.state.is_searching = lambda: "batcher" in state and state["batcher"].is_searching

    async def answers(request: Request, asked: Asked) -> list[bytes]:
        batcher: Batcher = state["batcher"]
        with _cancelled_with(request):
            return await batcher.search(asked.queries, (asked.topk, asked.with_scores))

    async def respond(request: Request) -> Response:
        started = time.perf_counter()
        try:
            async with arrivals.limit():
                length = request.headers.get("content-length", "").encode("latin-1")
                asked = await reader.read(length, request.stream())
            found = await answers(request, asked)
        except Refused as error:
            return JSONResponse({"detail": error.detail}, error.status)
        except NotArrived as error:
            status = 503 if arrivals.closing else 408
            return JSONResponse({"detail": str(error)}, status, {"Connection": "close"})
        except Overloaded as error:
            headers = {"Retry-After": str(error.seconds)}
            return JSONResponse({"detail": str(error)}, limits.busy_status, headers)
        except Closing as error:
            return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            # The reason goes to the client: nobody reads the log of a server far away.
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)
        except asyncio.CancelledError:
            if not arrivals.closing:
                raise
            detail = "the server is shutting down, and its time for answers is over"
            return JSONResponse({"detail": detail}, 503, {"Retry-After": "1"})
        metrics.queries.inc(len(found))
        metrics.request_seconds.observe(time.perf_counter() - started)
        return _Answer(found, turns)

    schema = reader.model.model_json_schema()
    schema["anyOf"] = [{"required": ["queries"]}, {"required": ["query"]}]
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": Refusal} for status in (408, 413, 429, 500, 503)
    }

    @app.post(
        "/retrieve",
        response_model=RetrieveResponse,
        responses={**refusals, 422: {"model": Problems}},
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    )
    async def retrieve(request: Request) -> Response:
        response = await respond(request)
        app.state.count(response.status_code)
        return response

    @app.get("/health", response_model=Health)
    async def health() -> Response:
        retriever: Retriever = state["retriever"]
        return JSONResponse(
            {
                "status": "ok",
                "passages": len(retriever),
                "description": retriever.description,
            }
        )

    @app.get("/metrics", response_class=Response)
    async def figures() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def encode(hits: list[Hit], with_scores: bool) -> bytes:
    """A query's list of the answer, as JSON.

    Raises:
        ValueError: for a score that is no number, which a damaged index may give.
    """
    found: list[Any] = [hit.document for hit in hits]
    if with_scores:
        found = [{"document": hit.document, "score": hit.score} for hit in hits]
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


class _Answer(Response):
    """The lists of all queries as one JSON, sent in pieces without being copied together."""

    media_type = "application/json"

    def __init__(self, lists: list[bytes], turns: Turns) -> None:
        super().__init__()
        self._lists = lists
        self._turns = turns
        # Between two lists is a comma.
        length = len(b'{"result":[') + sum(map(len, lists)) + max(0, len(lists) - 1) + len(b"]}")
        self.headers["content-length"] = str(length)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        held = 0
        parts = [b'{"result":[']
        for number, part in enumerate(self._lists):
            if number:
                parts.append(b",")
            parts.append(part)
            held += len(part)
            if held > PIECE:
                body = await self._turns.run(partial(b"".join, parts), SEND_SECONDS)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                held, parts = 0, []
        parts.append(b"]}")
        await send({"type": "http.response.body", "body": b"".join(parts)})


class NotArrived(Exception):
    """The body of a request did not come in its time."""


class Arrivals:
    """Bodies on their way; each has so many seconds, until the server closes.

    Attributes:
        closing: whether the server is shutting down.
    """

    def __init__(self, seconds: float) -> None:
        self.closing = False
        self._seconds = seconds
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """A body arrives in here.

        Raises:
            NotArrived: it did not.
        """
        limit = asyncio.timeout(LAST_SECONDS if self.closing else self._seconds)
        self._limits.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            reason = "the server is shutting down" if self.closing else f"in {self._seconds:g} s"
            raise NotArrived(f"the request did not arrive as a whole: {reason}") from None
        finally:
            self._limits.discard(limit)

    def close(self) -> None:
        """From now on nothing is waited for longer than a second."""
        self.closing = True
        end = asyncio.get_running_loop().time() + LAST_SECONDS
        for limit in self._limits:
            when = limit.when()
            if when is not None and when > end:
                limit.reschedule(end)


@contextmanager
def _cancelled_with(request: Request) -> Iterator[None]:
    """What runs in here is cancelled if the client leaves: `ClientDisconnect`."""
    task = asyncio.current_task()
    assert task is not None
    inside, left = True, False

    def leave(_: Any) -> None:
        nonlocal left
        if inside:
            left = True
            task.cancel()

    # After the body there is nothing to receive but that it left.
    watch = asyncio.ensure_future(request.receive())
    watch.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        inside = False
        watch.cancel()
