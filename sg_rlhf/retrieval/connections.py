"""Connections that do not go on: half a head, or answers that nobody reads.

uvicorn waits for the first part of a request, and for room to write, as long as it takes. The body
of a request has its time limit in `app`, where it can be answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's head; uvicorn's default server has no limit.
LARGEST_HEAD = 65_536


def limited(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with time limits.

    Args:
        seconds: how long the head of a request may take, from the connection or from its first byte
            on a connection that was used before; and how long a client may leave an answer unread.
    """

    class Limited(HttpToolsProtocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None
        _in_message = _in_body = False
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reading = self.loop.call_later(seconds, self.transport.abort)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_message = True

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._in_body = True

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_message = self._in_body = False

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head_bytes = 0
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
                self._part(len(data))

        def _part(self, size: int) -> None:
            """Part of a head came, or of a body that is refused already."""
            if self._reading is None:
                self._reading = self.loop.call_later(seconds, self.transport.abort)
            if not self._in_body:
                self._head_bytes += size
            if self._head_bytes > LARGEST_HEAD:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._writing = self._cancelled(self._writing)

        def connection_lost(self, exc: Exception | None) -> None:
            self._reading = self._cancelled(self._reading)
            self._writing = self._cancelled(self._writing)
            super().connection_lost(exc)

        @staticmethod
        def _cancelled(timer: asyncio.TimerHandle | None) -> None:
            if timer is not None:
                timer.cancel()

    return Limited
