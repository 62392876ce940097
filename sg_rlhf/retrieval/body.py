"""Reading a request piece by piece as it arrives, so that no body holds up the event loop.

    {"queries": ["...", ...], "topk": 3, "return_scores": true}      Search-R1's
    {"query": "...", "topk": 3, "return_scores": true}               SkyRL-gym's

A body is refused at the first thing that is wrong in it, however long it is, and never held as a
whole. A query is cut at the character limit: the reference's encoder cuts at 256 tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ijson  # type: ignore[import-untyped]
from pydantic import BaseModel, Field, ValidationError, create_model

from sg_rlhf.retrieval.limits import MOST_PASSAGES, Limits
from sg_rlhf.retrieval.turns import Turns

#: Bytes that are parsed at once, in a millisecond, or 8 where each third is a string of its own.
PIECE = 16_384
#: Of a string of which as much was there already: the parser reads it again with each piece.
LONG_PIECE = 65_536
#: Bytes of one string.
LONGEST_STRING = 2**20
#: Values beside the queries that are read over; more is no request of anybody's.
MOST_OTHERS = 1000


class Refused(Exception):
    """What a client did wrong: the answer's status and its `detail`."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


def _unprocessable(kind: str, place: list[str | int], message: str) -> Refused:
    return Refused(422, [{"type": kind, "loc": ["body", *place], "msg": message}])


class RetrieveRequest(BaseModel):
    """Queries to search for, or one query."""

    queries: list[str] | None = Field(None, description="each has a list of passages in the answer")
    query: str | None = Field(None, description="instead of queries: one of them")
    topk: int | None = Field(None, description="passages a query; the default if left out or 0")
    return_scores: bool = Field(False, description="wrap each passage with its score")


@dataclass(frozen=True)
class Asked:
    """A request that is right; its queries are cut to the limit."""

    queries: list[str]
    topk: int
    with_scores: bool


class Reader:
    """Reads bodies within `limits`, a piece at a time in `turns` of the event loop."""

    def __init__(self, limits: Limits, turns: Turns) -> None:
        self._limits = limits
        self._turns = turns
        # The limits belong into the schema, so the model is made when they are known.
        topk: Any = (int | None, Field(None, ge=0, le=limits.max_topk))
        queries: Any = (list[str] | None, Field(None, max_length=limits.max_queries))
        self.model: type[RetrieveRequest] = create_model(
            "RetrieveRequest", __base__=RetrieveRequest, queries=queries, topk=topk
        )

    async def read(self, length: bytes, pieces: AsyncIterator[bytes]) -> Asked:
        """The request of a body.

        Args:
            length: the header `Content-Length`, empty if there is none.

        Raises:
            Refused: 413 if it is too large, 422 if it is wrong.
        """
        most = self._limits.max_body
        if length and (not length.isdigit() or int(length) > most):
            raise self._too_large(f"a body of {length.decode('latin-1')[:40]} bytes")
        body = _Body(self._limits)
        received = 0
        async for piece in pieces:
            received += len(piece)
            if received > most:
                raise self._too_large(f"a body of more than {most} bytes")
            while piece:
                size = LONG_PIECE if body.without_event >= LONG_PIECE else PIECE
                await self._turns.run(partial(body.feed, piece[:size]))
                piece = piece[size:]
        body.end()
        return self._asked(body)

    def _too_large(self, found: str) -> Refused:
        return Refused(413, f"{found}, at most {self._limits.max_body} (--max-body-mb)")

    def _asked(self, body: _Body) -> Asked:
        queries = body.queries
        if queries is None:
            one = body.fields.pop("query", None)
            if "queries" in body.fields:
                raise _unprocessable("list_type", ["queries"], "Input should be a valid list")
            if one is None:
                raise _unprocessable("missing", ["queries"], "Field required (or query)")
            if not isinstance(one, str):
                raise _unprocessable("string_type", ["query"], "Input should be a valid string")
            queries = [one[: self._limits.max_query_chars]]
        try:
            options = self.model.model_validate(body.fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise _unprocessable(first["type"], [*first["loc"]], first["msg"]) from None
        topk = options.topk or self._limits.default_topk
        if len(queries) * topk > MOST_PASSAGES:
            raise _unprocessable(
                "too_long", ["topk"],
                f"{len(queries)} queries of {topk} passages, at most {MOST_PASSAGES} passages",
            )  # fmt: skip
        return Asked(queries, topk, options.return_scores)


class _Body:
    """The parser's state between two pieces.

    Attributes:
        queries: what was in the list of that name, cut; None if there was none.
        fields: the other fields that a request has, as they came; not yet checked.
        without_event: bytes of a value that has not ended.
    """

    def __init__(self, limits: Limits) -> None:
        self.queries: list[str] | None = None
        self.fields: dict[str, Any] = {}
        self._limits = limits
        self._events: Any = ijson.sendable_list()
        self._parser = ijson.basic_parse_coro(self._events, use_float=True)
        self._key = ""
        self._depth = 0
        self._in_queries = False
        self._others = 0
        self.without_event = 0

    def feed(self, piece: bytes) -> None:
        """Parse some bytes more.

        Raises:
            Refused: at what cannot become a request any more.
        """
        self._parse(lambda: self._parser.send(piece))
        if self._events:
            self.without_event = 0
            self._take_all()
        else:
            self.without_event += len(piece)
            if self.without_event > LONGEST_STRING:
                raise Refused(413, f"a string of more than {LONGEST_STRING} bytes")

    def end(self) -> None:
        """Whether the body was whole.

        Raises:
            Refused: if it was not.
        """
        self._parse(self._parser.close)
        self._take_all()

    def _parse(self, step: Any) -> None:
        try:
            step()
        except (ijson.JSONError, ValueError) as error:
            # What was right before it may hold a better reason.
            self._take_all()
            reason = error.args[0] if error.args else error
            text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            # The lines after the first show the input.
            message = f"JSON decode error: {text.strip().splitlines()[0][:100]}"
            raise _unprocessable("json_invalid", [], message) from None

    def _take_all(self) -> None:
        for event, value in self._events:
            if self._in_queries and event == "string" and self._depth == 2:
                self._add(value)
            else:
                self._take(event, value)
        self._events.clear()

    def _add(self, query: str) -> None:
        assert self.queries is not None
        if len(self.queries) == self._limits.max_queries:
            raise _unprocessable(
                "too_long", ["queries"],
                f"List should have at most {self._limits.max_queries} items (--max-queries)",
            )  # fmt: skip
        self.queries.append(query[: self._limits.max_query_chars])

    def _take(self, event: str, value: Any) -> None:
        self._others += 1
        if self._others > MOST_OTHERS:
            raise _unprocessable("too_long", [], f"more than {MOST_OTHERS} values beside queries")
        if self._depth == 0 and event != "start_map":
            raise _unprocessable("model_type", [], "Input should be an object")
        if event == "map_key":
            self._key = value if self._depth == 1 else self._key
        elif event in ("end_map", "end_array"):
            self._depth -= 1
            self._in_queries = self._in_queries and self._depth > 1
        elif self._in_queries:
            place: list[str | int] = ["queries", len(self.queries or ())]
            raise _unprocessable("string_type", place, "Input should be a valid string")
        else:
            self._start(event, value)

    def _start(self, event: str, value: Any) -> None:
        """A value begins, or is one already."""
        opens = event in ("start_map", "start_array")
        if self._depth == 1 and self._key in RetrieveRequest.model_fields:
            self.fields.pop(self._key, None)  # of two the last one counts, as in any parser
            if self._key == "queries":
                self.queries = [] if event == "start_array" else None
                self._in_queries = self.queries is not None
            if not self._in_queries:
                self.fields[self._key] = [] if opens else value
        if opens:
            self._depth += 1
