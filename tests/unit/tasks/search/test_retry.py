"""A retriever that goes away: waited for so long and no longer, and told once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sg_rlhf.tasks.search.limits import Limits
from sg_rlhf.tasks.search.retriever import client as client_module
from sg_rlhf.tasks.search.retriever.client import RetrieverClient, RetrieverError
from sg_rlhf.tasks.search.settings import SearchSettings
from tests.unit.tasks.search.http_retriever import Reply, Retriever, found, running

#: The contract's smallest server, in a process that can be killed.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        passage = {"document": {"id": "0", "contents": "T\\nx"}, "score": 1.0}
        data = json.dumps({"result": [[passage] for _ in body["queries"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with running() as server:
        yield server


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)]) as process:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.02)
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def client_of(url: str, said: list[str], **limits: Any) -> RetrieverClient:
    chosen = {"backoff_s": 0.05, "timeout_s": 60.0, "retries": 0, "outage_s": 0.0, **limits}
    return RetrieverClient(SearchSettings(url=url), limits=Limits(**chosen), notify=said.append)


def test_a_killed_server_is_waited_for_and_every_search_is_answered(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REPORTED_AFTER_S", 0.2)
    said: list[str] = []
    url = f"http://127.0.0.1:{port}/retrieve"

    async def dialogue(client: RetrieverClient, number: int) -> int:
        answered = 0
        for turn in range(40):
            answered += len(await client.search(f"dialogue {number} turn {turn}"))
            await asyncio.sleep(0.02)
        return answered

    async def run() -> list[int]:
        client = client_of(url, said, outage_s=300.0)
        with serving(port):
            dialogues = [asyncio.create_task(dialogue(client, i)) for i in range(32)]
            await asyncio.sleep(0.3)
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in dialogues)
        with serving(port):
            results = await asyncio.gather(*dialogues)
        await client.aclose()
        return results

    assert asyncio.run(run()) == [40] * 32
    assert len(said) == 2
    assert said[0].startswith(f"retriever {url}: no connection (")
    assert said[0].endswith("; waiting for it, up to 300 s")
    assert said[1] == f"retriever {url}: answers again"


def test_an_outage_that_does_not_end_fails_all_at_its_deadline(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REPORTED_AFTER_S", 0.0)
    said: list[str] = []

    async def run() -> list[Any]:
        client = client_of(f"http://127.0.0.1:{port}/retrieve", said, outage_s=1.5)
        started = time.monotonic()
        asked = [client.search(f"query {i}") for i in range(100)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - started >= 1.5
        await client.aclose()
        return results

    assert all("no connection" in str(error) for error in asyncio.run(run()))
    assert len(said) == 1


def test_a_hanging_retriever_fails_all_at_the_end(retriever: Retriever) -> None:
    retriever.delay_s = 3600.0

    async def run() -> list[Any]:
        client = client_of(retriever.url, [], outage_s=0.5, timeout_s=0.1, max_connections=1)
        asked = [client.search(f"query {i}") for i in range(8)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        await client.aclose()
        return results

    errors = asyncio.run(run())
    assert all(isinstance(e, RetrieverError) and "no answer within 0.1 s" in str(e) for e in errors)


def once(first: Reply) -> Callable[[dict[str, Any]], Reply]:
    replies = [first]
    return lambda body: replies.pop() if replies else found(body)


@pytest.mark.parametrize("status", [500, 503, 507])
def test_every_temporary_failure_is_waited_for_as_long(retriever: Retriever, status: int) -> None:
    """Retries alone would end after the first."""

    def reply(body: dict[str, Any]) -> Reply:
        return found(body) if len(retriever.requests) > 4 else (status, b"out of memory")

    retriever.reply = reply

    async def run() -> None:
        client = client_of(retriever.url, [], outage_s=300.0)
        assert len(await client.search("q")) == 3
        await client.aclose()

    asyncio.run(run())
    assert len(retriever.requests) == 5


def test_an_outage_of_a_moment_is_not_told(retriever: Retriever) -> None:
    said: list[str] = []
    retriever.reply = once((503, b"busy"))

    async def run() -> None:
        client = client_of(retriever.url, said, outage_s=10.0)
        await client.search("q")
        await client.aclose()

    asyncio.run(run())
    assert said == []
