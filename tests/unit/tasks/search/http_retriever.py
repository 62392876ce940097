"""A real small HTTP server that speaks the retriever's contract, and can be told to misbehave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.http_server import serving

#: Status, the answer's body (bytes as they are, else as JSON), and more headers.
Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def passages(*contents: str) -> list[dict[str, Any]]:
    """A query's results as the contract has them."""
    return [
        {"document": {"id": str(i), "contents": text}, "score": 1.0 - i / 10}
        for i, text in enumerate(contents)
    ]


def found(body: dict[str, Any]) -> Reply:
    """What a healthy server answers: `topk` passages that name the query."""
    return 200, {
        "result": [
            passages(*(f'"About {query}"\nFact {i} on {query}.' for i in range(body["topk"])))
            for query in body["queries"]
        ]
    }


@dataclass
class Retriever:
    """A running server: its address, what it was asked, and how it answers."""

    url: str
    reply: Callable[[dict[str, Any]], Reply] = found
    delay_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: set[tuple[str, int]] = field(default_factory=set)

    @contextmanager
    def answering(self, reply: Callable[[dict[str, Any]], Reply]) -> Iterator[None]:
        """Other answers for the length of a block."""
        before, self.reply = self.reply, reply
        try:
            yield
        finally:
            self.reply = before


@contextmanager
def running() -> Iterator[Retriever]:
    """A server on a free port of 127.0.0.1, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections open

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            retriever.requests.append(body)
            retriever.connections.add(self.client_address)
            time.sleep(retriever.delay_s)
            status, answer, *headers = retriever.reply(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that gave up is part of the tests

    with serving(Handler, Server) as url:
        retriever = Retriever(f"{url}/retrieve")
        yield retriever
