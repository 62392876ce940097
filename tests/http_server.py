"""A small HTTP server on the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any


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
