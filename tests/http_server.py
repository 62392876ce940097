"""A small HTTP server on the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers quietly; a server's own class adds ``do_GET`` and ``do_POST``."""

    def log_message(self, *_: Any) -> None:
        """Nothing goes to the terminal."""

    def content(self) -> bytes:
        """What the request sent."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, content: bytes) -> None:
        """Answer with the status 200."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(
    handler: Callable[..., Any], server: type[ThreadingHTTPServer] = ThreadingHTTPServer
) -> Iterator[str]:
    """Serve on a free port until the block ends; yields the address, without a slash at its end."""
    with server(("127.0.0.1", 0), handler) as running:
        # It looks every 10 ms whether to end; by default every half second, for which tests wait.
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()
