"""The HTTP API: a FastAPI application with Search-R1's contract (docs/search.md)."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from sg_rlhf.retrieval.batching import Batcher, QueueFull
from sg_rlhf.retrieval.corpus import Document
from sg_rlhf.retrieval.limits import MAX_PASSAGES, Limits
from sg_rlhf.retrieval.metrics import Metrics
from sg_rlhf.retrieval.search import Hit, Retriever


class RetrieveResponse(BaseModel):
    """One list per query, best first; shorter than topk where fewer passages match."""

    result: list[list[Hit]] | list[list[Document]]


def create_app(retriever: Retriever, limits: Limits) -> FastAPI:
    """The application."""
    metrics = Metrics()

    def search(queries: Sequence[str], options: Any) -> list[bytes]:
        topk, with_scores = options
        return [encode(hits, with_scores) for hits in retriever.search(queries, topk)]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(search, metrics, limits)  # needs the event loop
        yield
        app.state.batcher.close()

    about = "Passage retrieval with Search-R1's HTTP contract: see POST /retrieve."
    app = FastAPI(title="sg_rlhf retrieval", description=about, lifespan=lifespan)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=limits.max_body_mb * 2**20)

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        # The first error alone, without its input: a bad body may have a million of them.
        first = {key: error.errors()[0][key] for key in ("type", "loc", "msg")}
        return JSONResponse({"detail": [first]}, 422)

    class RetrieveRequest(BaseModel):
        """Queries to search for (Search-R1), or one query (SkyRL-gym)."""

        queries: list[str] | None = Field(None, max_length=limits.max_queries, fail_fast=True)
        query: str | None = Field(None, description="instead of queries: one of them")
        topk: int | None = Field(None, ge=0, le=limits.max_topk, description="default if 0")
        return_scores: bool = Field(False, description="wrap each passage with its score")

    errors: dict[int | str, dict[str, Any]] = {
        400: {"description": "no JSON"},
        413: {"description": "too long"},
        limits.busy_status: {"description": "too many queries are waiting"},
        500: {"description": "the search failed"},
    }

    @app.post("/retrieve", response_model=RetrieveResponse, responses=errors)
    async def retrieve(request: RetrieveRequest) -> Response:
        asked = request.queries
        if asked is None:
            if request.query is None:
                raise _invalid("missing", ("body", "queries"), "Field required (or query)")
            asked = [request.query]
        topk = request.topk or limits.topk
        if len(asked) * topk > MAX_PASSAGES:
            reason = f"queries x topk: at most {MAX_PASSAGES} passages in an answer"
            raise _invalid("too_long", ("body",), reason)
        try:
            found = await app.state.batcher.search(
                [_clean(query, limits.max_query_chars) for query in asked],
                (topk, request.return_scores),
            )
        except QueueFull as error:
            return JSONResponse({"detail": str(error)}, limits.busy_status, {"Retry-After": "1"})
        except Exception as error:
            # The reason goes to the client: nobody reads the log of a remote server.
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)
        metrics.queries.inc(len(found))
        return Response(b'{"result":[' + b",".join(found) + b"]}", media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        described = retriever.description
        return {"status": "ok", "passages": len(retriever), "description": described}

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def encode(hits: list[Hit], with_scores: bool) -> bytes:
    """The list of one query in the answer, as JSON; ValueError for NaN (a damaged index)."""
    found: list[Any] = [hit.document for hit in hits]
    if with_scores:
        found = [{"document": hit.document, "score": hit.score} for hit in hits]
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _clean(query: str, max_chars: int) -> str:
    """The start of a query, `?` for half of a UTF-16 pair, which no tokenizer takes."""
    return query[:max_chars].encode(errors="replace").decode()


def _invalid(kind: str, place: tuple[str, ...], message: str) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": place, "msg": message}])
