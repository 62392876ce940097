"""Connections of the server: read in small pieces, and ended where they do not go on.

uvicorn parses all that has arrived on a connection at once, up to 256 KB of each in a turn of the
event loop, and takes as many requests as a client sends in a row. It waits for the first part of a
request, and for room to write, as long as it takes. The body of a request has its time limit in
`app`, where it can be answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sg_rlhf.retrieval.turns import Turns

#: Bytes of a request's head, and headers in it; uvicorn's default server has no limit.
LARGEST_HEAD = 16_384
MOST_HEADERS = 128
#: Bytes that are read at once from a connection; no more is held of it unparsed.
READ = 16_384
#: Bytes that are parsed at once, but for the body of a request that says its length: parsing costs
#: the most for requests, headers and chunks of a few bytes.
SLICE = 1024
#: Seconds that the application takes to begin a request.
BEGIN_SECONDS = 2.5e-4
#: Whoever asks this wants to know at once.
HEALTH = "/health"
#: The first uvicorn that begins each request by the method that `Http` overrides. An older one
#: would never call it: neither the time limits nor the end of a request would work.
LEAST_UVICORN = "0.45"


def check_uvicorn() -> None:
    """Refuse a uvicorn that would not call what is overridden here.

    Raises:
        ValueError: naming both versions.
    """
    if not hasattr(HttpToolsProtocol, "_start_asgi_task"):
        raise ValueError(
            f"uvicorn {uvicorn.__version__} is installed, expected {LEAST_UVICORN} or later: "
            f"pip install 'uvicorn>={LEAST_UVICORN}'"
        )


def limited(seconds: float, turns: Turns, count: Callable[[int], None]) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with limits: what it calls for a protocol of each connection.

    Args:
        seconds: how long the head of a request may take, from the connection or from its first byte
            on a connection that was used before; and how long a client may leave an answer unread.
        turns: parse in these, and begin requests.
        count: called with the status of what is refused here.
    """
    # One for all: what was read is copied out of it before anything else is read.
    room = memoryview(bytearray(READ))

    def connection(**given: Any) -> Connection:
        return Connection(Http(seconds, turns, count, given), turns, room)

    # uvicorn does no more with it than call it.
    return cast("type[asyncio.Protocol]", connection)


class Connection(asyncio.BufferedProtocol):
    """Reads a piece, and no more until uvicorn's parser has had it, slice by slice."""

    def __init__(self, http: Http, turns: Turns, room: memoryview) -> None:
        self._http = http
        self._turns = turns
        self._room = room
        self._unparsed = b""
        self._is_queued = self._is_paused = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._http.begin(transport, self._go_on)

    def get_buffer(self, _: int) -> memoryview:
        return self._room

    def buffer_updated(self, size: int) -> None:
        assert not self._unparsed
        self._unparsed = bytes(self._room[:size])
        self._go_on()
        if self._unparsed and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Parse what there is, as far as the request before it and its reader let it go on."""
        if self._unparsed and not self._is_queued and self._http.takes_more:
            self._is_queued = True
            self._turns.call(self._parse, urgent=self._http.heard + len(self._unparsed) <= SLICE)

    def _parse(self) -> None:
        self._is_queued = False
        if self._transport.is_closing():
            self._unparsed = b""
        # The reader may have stopped it meanwhile.
        elif self._unparsed and self._http.takes_more:
            size = max(SLICE, self._http.body_left)
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._http.data_received(piece)
            self._go_on()
        if self._is_paused and not self._unparsed and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def eof_received(self) -> None:
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = b""
        self._http.connection_lost(exc)


class _Flow(FlowControl):
    """Asks a connection to wait where uvicorn would tell its transport."""

    def __init__(self, transport: Any, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._go_on()


class Http(HttpToolsProtocol):
    """uvicorn's protocol with time limits.

    Attributes:
        body_left: bytes that are missing of a body whose length is known.
        heard: bytes parsed since the last answer.
    """

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    #: The request that is answered; uvicorn's `cycle` is the newest, which may wait for its turn.
    _running: RequestResponseCycle | None = None
    _in_message = _in_body = False
    _head_bytes = 0
    body_left = heard = 0

    def __init__(
        self, seconds: float, turns: Turns, count: Callable[[int], None], given: dict[str, Any]
    ) -> None:
        super().__init__(**given)
        self._seconds = seconds
        self._turns = turns
        self._count = count

    def begin(self, transport: Any, go_on: Callable[[], None]) -> None:
        """The connection is there; `go_on` is called when more can be parsed."""
        super().connection_made(transport)
        # Whatever is unsent counts as unread: by default it is what is above 64 KiB.
        transport.set_write_buffer_limits(high=0)
        self._go_on = go_on
        self.flow = _Flow(transport, go_on)
        self._limit_reading()

    @property
    def takes_more(self) -> bool:
        """Whether the next bytes may be parsed: their requests would wait for others' answers."""
        return not self.flow.read_paused and not self.pipeline

    @property
    def is_answering(self) -> bool:
        """Whether part of an answer is sent."""
        running = self._running
        begun = running is not None and running.response_started and not running.response_complete
        return self._writing is not None or begun

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if name.lower() == b"content-length" and value.isdigit():
            self.body_left = int(value)
        if len(self.headers) > MOST_HEADERS:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.body_left = max(0, self.body_left - len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = self._in_body = False
        self.body_left = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        begin = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] == HEALTH:
            begin()
        else:
            self._turns.call(begin, seconds=BEGIN_SECONDS)

    def send_400_response(self, msg: str) -> None:
        self._count(400)
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self.heard = 0
        super().on_response_complete()
        # Part of the next request's head may be there already, and nothing comes after it.
        begun = self._in_message and not self._in_body and not self.pipeline
        if begun and not self.transport.is_closing():
            self._limit_reading()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        self.heard += len(data)
        super().data_received(data)
        if self._in_message and not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEAD:
                self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self._reading = self._cancelled(self._reading)
        elif not self._in_message:
            # A body that was refused has ended. uvicorn's time for an unused connection is off
            # since it began.
            self._reading = self._cancelled(self._reading)
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            # Part of a head came, or of a body that is refused already.
            self._limit_reading()

    def _limit_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = self._cancelled(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading = self._cancelled(self._reading)
        self._writing = self._cancelled(self._writing)
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    @staticmethod
    def _cancelled(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
