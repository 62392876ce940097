"""A retriever for the length of a run."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sg_rlhf.common import child_process
from sg_rlhf.run.choice import ChoiceError

#: How long the server may take to end, seconds.
END_SECONDS = 5.0
#: Lines of its log in an error.
LAST_LINES = 5


@contextlib.contextmanager
def serving(index: Path, port: int, log: Path) -> Iterator[str]:
    """Serve an index on this machine until the context ends.

    Args:
        index: a built index.
        port: where to listen.
        log: file for the server's output.

    Yields:
        The URL for ``sg.search.url``.

    Raises:
        ChoiceError: the port is taken, or the server ended before it answered.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ChoiceError(
                f"SG_PORT={port}: something already listens there; choose another, or set "
                "SG_RETRIEVER_URL"
            )
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sg_rlhf.retrieval.server", "--index", str(index)]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C ends the run first, and the run the server.
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        print(f"waiting for the retriever on port {port} (log: {log})", flush=True)
        while not _answers(port):
            if server.poll() is not None:
                *_, last = ["", *log.read_text(errors="replace").splitlines()[-LAST_LINES:]]
                raise ChoiceError(f"the retriever ended before it answered: {last} (log: {log})")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        child_process.end(server, END_SECONDS)


def _answers(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False
