"""The HTTP side: a FastAPI application around a `Retriever`.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id", "contents"}, "score"}]]}     a list a query
                    {"result": [[{"id", "contents"}]]}                            without scores
    GET /health, /metrics (Prometheus), /docs (OpenAPI)

What a client did wrong is 422 with the reason, a full queue 503 with `Retry-After`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StringConstraints, create_model
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sg_rlhf.retrieval.batching import Batcher, Overloaded
from sg_rlhf.retrieval.corpus import Document
from sg_rlhf.retrieval.metrics import Metrics
from sg_rlhf.retrieval.search import Hit, Retriever

DESCRIPTION = "Passage retrieval with Search-R1's HTTP contract: see POST /retrieve."


@dataclass(frozen=True)
class Limits:
    """What a server accepts and how it batches; the flags of the same names explain them."""

    max_queries: int = 1024
    max_query_chars: int = 8192
    max_topk: int = 100
    default_topk: int = 3
    max_batch: int = 256
    max_wait_ms: float = 3.0
    max_pending: int = 4096
    cache_size: int = 16_384

    def check(self) -> None:
        """Refuse limits that contradict each other.

        Raises:
            ValueError: naming the flags.
        """
        if self.default_topk > self.max_topk:
            raise ValueError(f"--topk {self.default_topk}: above --max-topk {self.max_topk}")
        if self.max_queries > self.max_pending:
            raise ValueError(
                f"--max-queries {self.max_queries}: above --max-pending {self.max_pending}, "
                "so such a request could never be accepted"
            )

    @property
    def max_body(self) -> int:
        """Bytes of the largest request; a character takes up to 12, as two `\\uXXXX`."""
        return self.max_queries * (self.max_query_chars * 12 + 16) + 4096


class RetrieveRequest(BaseModel):
    """Queries to search for."""

    queries: list[str]
    topk: int | None = Field(None, description="passages a query; the server's default if left out")
    return_scores: bool = Field(False, description="wrap each passage with its score")


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


class Health(BaseModel):
    """What is served."""

    status: str
    passages: int
    description: str


def create_app(load: Callable[[], Retriever], limits: Limits) -> FastAPI:
    """The application; `load` is called when it starts.

    The application is stateless but for its cache, so any number of them may serve one index.
    """
    metrics = Metrics()
    state: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        retriever = state["retriever"] = load()
        batcher = state["batcher"] = Batcher(
            retriever.search,
            metrics,
            max_batch=limits.max_batch,
            max_wait=limits.max_wait_ms / 1e3,
            max_pending=limits.max_pending,
            cache_size=limits.cache_size,
        )
        yield
        await batcher.close()

    app = FastAPI(title="sg_rlhf retrieval", description=DESCRIPTION, lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=limits.max_body)

    async def retrieve(body: RetrieveRequest) -> Response:
        started = time.perf_counter()
        batcher: Batcher = state["batcher"]
        try:
            hits = await batcher.search(body.queries, body.topk or limits.default_topk)
        except Overloaded as error:
            metrics.requests.labels("503").inc()
            return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})
        except Exception as error:
            # The reason goes to the client: nobody reads the log of a server far away.
            metrics.requests.labels("500").inc()
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)
        metrics.requests.labels("200").inc()
        metrics.queries.inc(len(hits))
        response = JSONResponse({"result": [_result(some, body.return_scores) for some in hits]})
        metrics.request_seconds.observe(time.perf_counter() - started)
        return response

    # The limits belong into the OpenAPI schema, so the model is made when they are known.
    retrieve.__annotations__["body"] = _request_model(limits)
    app.post(
        "/retrieve",
        response_model=RetrieveResponse,
        responses={status: {"model": Refusal} for status in (400, 413, 500, 503)},
    )(retrieve)

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

    @app.exception_handler(RequestValidationError)
    async def unprocessable(_: Request, error: RequestValidationError) -> Response:
        metrics.requests.labels("422").inc()
        # Without the input: it may be huge, or hold what JSON cannot (NaN, a lone surrogate).
        detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()]
        return JSONResponse({"detail": detail}, 422)

    return app


def _request_model(limits: Limits) -> type[RetrieveRequest]:
    query = Annotated[str, StringConstraints(max_length=limits.max_query_chars)]
    return create_model(
        "RetrieveRequest",
        __base__=RetrieveRequest,
        queries=(list[query], Field(max_length=limits.max_queries)),
        topk=(
            int | None,
            Field(
                None,
                ge=1,
                le=limits.max_topk,
                description=f"passages a query; {limits.default_topk} if left out",
            ),
        ),
    )


def _result(hits: list[Hit], with_scores: bool) -> list[Any]:
    if with_scores:
        return [{"document": hit.document, "score": hit.score} for hit in hits]
    documents: list[Document] = [hit.document for hit in hits]
    return documents


class BodyLimit:
    """ASGI middleware: a body of more than `limit` bytes is refused before it is held in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            refusal = {
                "detail": f"a body of {length.decode('latin-1')} bytes, at most {self._limit}"
            }
            await JSONResponse(refusal, 413)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                # Sent in chunks, without a length: there is no telling how much more is to come.
                return {"type": "http.disconnect"}
            return message

        await self._app(scope, counted, send)
