"""Over a socket: requests that do not go on, bodies that are refused, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from sg_rlhf.retrieval import connections
from sg_rlhf.retrieval.app import create_app
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import open_index

#: Long enough for a client that a busy machine holds up, short enough for a test.
SECONDS = 2.0
KEEP_ALIVE = 4
LIMITS = Limits(max_queries=1000, receive_seconds=SECONDS)
HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def running(index: Path, limits: Limits) -> Iterator[uvicorn.Server]:
    """A server in a thread."""
    config = uvicorn.Config(
        create_app(lambda: open_index(index), limits),
        http=connections.limited(limits.receive_seconds),
        port=0,
        log_level="error",
        timeout_keep_alive=KEEP_ALIVE,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join()


def address_of(server: uvicorn.Server) -> tuple[str, int]:
    found: tuple[str, int] = server.servers[0].sockets[0].getsockname()
    return found


@pytest.fixture(scope="module")
def address(bm25_index: Path) -> Iterator[tuple[str, int]]:
    with running(bm25_index, LIMITS) as server:
        yield address_of(server)


def sent(address: tuple[str, int], content: bytes) -> socket.socket:
    connection = socket.create_connection(address, 30)
    connection.sendall(content)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    content = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            content += part
    return content


def test_half_a_request_is_given_up(address: tuple[str, int]) -> None:
    start = time.monotonic()
    heads = [sent(address, content) for content in (b"", b"POST /ret", HEAD)]
    body = sent(address, HEAD + b'\r\n{"queries": [')
    second = sent(address, GET + b"GET /hea")
    assert [received(head) for head in heads] == [b"", b"", b""]
    answer = received(body)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive as a whole: in 2 s" in answer
    assert received(second).count(b"HTTP/1.1 200") == 1
    assert time.monotonic() - start < 10 * SECONDS
    text = httpx.get("http://{}:{}/metrics".format(*address)).text
    assert 'sg_retrieval_requests_total{status="408"} 1.0' in text


def test_an_endless_head_is_cut(address: tuple[str, int]) -> None:
    connection = sent(address, HEAD)
    padding = (b"X-Padding: " + b"x" * 4000 + b"\r\n") * 10_000
    with pytest.raises(ConnectionError):
        connection.sendall(padding)


@pytest.mark.parametrize("end", [GET, b""])
def test_a_large_body_is_refused_while_it_is_sent(address: tuple[str, int], end: bytes) -> None:
    """Clients write to the end before they read; then the connection can be used again."""
    body = b'{"queries": [' + b'"x",' * 4_000_000 + b'"x"]}'
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    start = time.monotonic()
    answer = received(sent(address, head + body + end))
    assert answer.startswith(b"HTTP/1.1 422") and b"at most 1000 items" in answer
    assert answer.count(b"HTTP/1.1 200") == bool(end)
    assert time.monotonic() - start > KEEP_ALIVE - 1, "an unused connection was closed early"


def test_an_answer_that_nobody_reads_is_given_up(address: tuple[str, int]) -> None:
    body = b'{"topk": 100, "queries": [' + b",".join(b'"film %d"' % i for i in range(900)) + b"]}"
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(address)
    connection.sendall(head + body)
    time.sleep(2.5 * SECONDS)
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 200") and not answer.endswith(b"]}")


#: Whole requests that cost a server as much as its limits allow.
HOSTILE = {
    "lists": b'{"queries": [' + b"[]," * 1_000_000,
    "empty queries": b'{"queries": [' + b'"",' * 1_000_000,
    "a long string": b'{"queries": ["' + b"x" * 3_000_000,
    "long queries": b'{"queries": [' + (b'"' + b"y" * 1_000_000 + b'",') * 3,
    "brackets": b"[" * 1_000_000,
    "objects": b'{"":' * 700_000,
    "numbers": b'{"queries": [], "topk": ' + b"1" * 3_000_000,
    "other fields": b"{" + b'"a": 1,' * 1_000_000,
    "queries": json.dumps({"queries": [f"{n} film" for n in range(16_384)]}).encode(),
}


def test_no_turn_of_the_event_loop_is_long(bm25_index: Path) -> None:
    """Whatever is posted, `/health` waits for one turn: in processor time, which is steady."""
    stop = threading.Event()

    async def longest() -> float:
        worst = 0.0
        while not stop.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - before)
        return worst

    def post(address: tuple[str, int], body: bytes, chunked: bool) -> None:
        kind = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
        if chunked:
            body = b"1\r\n{\r\n" * 200_000
        with contextlib.suppress(OSError):
            start = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            received(sent(address, start + kind + b"\r\n\r\n" + body))

    with running(bm25_index, Limits()) as server, ThreadPoolExecutor(32) as pool:
        watch = asyncio.run_coroutine_threadsafe(longest(), server.servers[0].get_loop())
        halves = [sent(address_of(server), HEAD + b"\r\n{" * (n % 2)) for n in range(100)]
        bodies = [body for body in HOSTILE.values() for _ in range(4)]
        posts = [pool.submit(post, address_of(server), body, False) for body in bodies]
        posts += [pool.submit(post, address_of(server), b"", True) for _ in range(4)]
        for each in posts:
            each.result()
        stop.set()
        worst = watch.result()
        for half in halves:
            half.close()
        health = httpx.get("http://{}:{}/health".format(*address_of(server)))
    assert health.status_code == 200
    assert worst < 0.1, f"a turn of {1e3 * worst:.0f} ms"
