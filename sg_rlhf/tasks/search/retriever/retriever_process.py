"""The search engine of a run or an evaluation: one that runs, or our own over an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sg_rlhf.common import child_process
from sg_rlhf.common.text import notice_if_slow
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.search.limits import LIMITS, Limits
from sg_rlhf.tasks.search.retriever.client import RetrieverError, ask
from sg_rlhf.tasks.search.settings import SearchSettings

#: An index of many gigabytes is read from disk before the server listens.
START_SECONDS = 1800.0
STOP_SECONDS = 30.0
#: Asked at the start. The best passages tell whether a resumed run searches the same corpus.
PROBES = ("Beijing", "Who wrote Faust?", "first president of the United States")

_LISTENING = re.compile(r"^listening on (http://\S+)", re.MULTILINE)


def address(given: str) -> str:
    """Where queries are posted: the path `/retrieve` is added to a bare address."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EvalError(f"--retriever {given}: expected http://HOST:PORT or http://HOST:PORT/PATH")
    return f"{given.rstrip('/')}/retrieve" if parts.path in ("", "/") else given


@contextlib.contextmanager
def serve(index: Path, port: int = 0, log: Path | None = None) -> Iterator[str]:
    """Run our server over an index; gives its address, and stops it at the end.

    Its output goes to `log`. EvalError has its last line if it does not start.
    """
    server = ["sg_rlhf.retrieval.server", "--index", str(index), "--port", str(port)]
    with log.open("w+") if log else tempfile.TemporaryFile("w+") as output:
        # A session of its own: Ctrl-C ends this process first, and this process the server.
        process = subprocess.Popen(
            [sys.executable, "-m", "sg_rlhf.common.with_parent", str(os.getpid()), *server],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            with notice_if_slow(f"starting the retriever of {index} (up to {START_SECONDS:g} s)"):
                url = _wait_until_listening(process, output.fileno(), index)
            yield url
        finally:
            child_process.end(process, STOP_SECONDS)


async def probe(settings: SearchSettings, limits: Limits = LIMITS) -> str:
    """Ask a few fixed questions; a SHA-256 of the best passages. EvalError without an answer."""
    try:
        found = await ask(settings, *PROBES, limits=limits)
    except RetrieverError as error:
        raise EvalError(
            f"{error}; start one with `sg-rlhf serve --index DIR`, "
            "or give --index DIR, --retriever URL or --no-search"
        ) from None
    best = [[p.title, p.text] for passages in found for p in passages[:1]]
    return hashlib.sha256(json.dumps(best).encode()).hexdigest()


def _wait_until_listening(process: subprocess.Popen[bytes], output: int, index: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        # Looked at before the text: what a server wrote before it ended is then read too.
        ended = process.poll()
        text = Path(f"/proc/self/fd/{output}").read_text(errors="replace")
        if found := _LISTENING.search(text):
            return f"{found[1]}/retrieve"
        if ended is not None:
            last = (text.strip().splitlines() or ["no message"])[-1]
            raise EvalError(f"--index {index}: the retrieval server ended with {ended}: {last}")
        time.sleep(0.05)
    raise EvalError(f"--index {index}: the retrieval server did not start in {START_SECONDS:g} s")
