"""Over a socket: requests that do not go on, bodies that are refused, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from sg_rlhf.retrieval import connections
from sg_rlhf.retrieval.app import create_app
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import open_index
from sg_rlhf.retrieval.turns import Turns

#: Long enough for a client that a busy machine holds up, short enough for a test.
SECONDS = 2.0
KEEP_ALIVE = 4
LIMITS = Limits(max_queries=1000, receive_seconds=SECONDS)
HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def running(index: Path, limits: Limits, opened: Any = None) -> Iterator[uvicorn.Server]:
    """A server in a thread, of the index or of what was opened."""
    turns = Turns()
    app = create_app(lambda: opened or open_index(index), limits, turns)
    config = uvicorn.Config(
        app,
        http=connections.limited(limits.receive_seconds, turns, app.state.count),
        ws="none",
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
    connection = socket.create_connection(address, 300)
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
    heads = [sent(address, content) for content in (b"", b"POST /ret", HEAD)]
    body = sent(address, HEAD + b'\r\n{"queries": [')
    second = sent(address, GET + b"GET /hea")
    assert [received(head) for head in heads] == [b"", b"", b""]
    answer = received(body)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive as a whole: in 2 s" in answer
    assert received(second).count(b"HTTP/1.1 200") == 1
    text = httpx.get("http://{}:{}/metrics".format(*address)).text
    assert 'sg_retrieval_requests_total{status="408"} 1.0' in text


def test_half_a_head_behind_an_answer_is_given_up(
    bm25_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time of a head, not in that of an unused connection."""
    monkeypatch.setattr(f"{__name__}.KEEP_ALIVE", 3600)
    with running(bm25_index, LIMITS) as server:
        answers = received(sent(address_of(server), GET + b"GET /hea"))
        assert answers.count(b"HTTP/1.1 200") == 1


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


def test_an_answer_that_nobody_reads_is_given_up(bm25_index: Path) -> None:
    body = b'{"topk": 100, "queries": [' + b",".join(b'"film %d"' % i for i in range(900)) + b"]}"
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(300)
    with running(bm25_index, LIMITS) as server:
        connection.connect(address_of(server))
        connection.sendall(head + body)
        connected(server)
        while server.server_state.connections:
            time.sleep(0.05)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 200") and not answer.endswith(b"]}")


def post(body: bytes, *headers: bytes) -> bytes:
    start = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    return start + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def chunked(pieces: Sequence[bytes], *headers: bytes) -> bytes:
    start = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return (
        start + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + chunks + b"0\r\n\r\n"
    )


CLOSE = b"Connection: close"


def bodies_of(answers: bytes) -> list[Any]:
    """The JSON of each answer on a connection, in order."""
    found = []
    while answers:
        head, answers = answers.split(b"\r\n\r\n", 1)
        size = next(int(line[16:]) for line in head.lower().splitlines() if b"-length: " in line)
        found.append(json.loads(answers[:size]))
        answers = answers[size:]
    return found


def test_requests_in_a_row_are_answered_in_order(address: tuple[str, int]) -> None:
    """Small and large ones, of known length and in chunks, cut anywhere by the reads."""
    asked: list[list[str]] = [[f"film {n}", "river" * (1 + 37 * n % 400)] for n in range(300)]
    content = b""
    for number, queries in enumerate(asked):
        body = json.dumps({"queries": queries, "topk": 2}).encode()
        close = [CLOSE] if number == len(asked) - 1 else []
        if number % 3:
            content += post(body, *close)
        else:
            step = 1 + number % 50
            content += chunked([body[i : i + step] for i in range(0, len(body), step)], *close)
        content += GET * (number % 7 == 0 and not close)
    with ThreadPoolExecutor(2) as pool:
        connection = socket.create_connection(address, 300)
        writing = pool.submit(connection.sendall, content)
        answers = bodies_of(received(connection))
        writing.result()
    assert sum("status" in answer for answer in answers) == 43
    found = [answer["result"] for answer in answers if "result" in answer]
    url = "http://{}:{}/retrieve".format(*address)
    with httpx.Client() as client:
        for queries, result in zip(asked, found, strict=True):
            alone = client.post(url, json={"queries": queries, "topk": 2}).json()["result"]
            assert result == alone


def test_requests_in_a_row_wait_unparsed(bm25_index: Path) -> None:
    """Or a client would fill the memory with requests of a few bytes."""
    with running(bm25_index, Limits()) as server:
        connection = sent(address_of(server), GET * 200)
        connection.settimeout(5)
        waiting = 0
        with contextlib.suppress(TimeoutError):
            while True:
                connection.sendall(GET * 1000)
                for each in list(server.server_state.connections):
                    waiting = max(waiting, len(each.pipeline))  # type: ignore[union-attr]
        connection.close()
        assert httpx.get("http://{}:{}/health".format(*address_of(server))).status_code == 200
    assert 1 < waiting < 100


@pytest.mark.parametrize("unanswered", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_what_came_before_a_client_stopped_sending(
    address: tuple[str, int], unanswered: bytes
) -> None:
    """As uvicorn does: the end of what a client sends is the end of its connection."""
    connection = sent(address, GET * 3 + unanswered)
    answers = b""
    while answers.count(b"}") < 3:
        answers += connection.recv(65536)
    connection.shutdown(socket.SHUT_WR)
    assert len(bodies_of(answers + received(connection))) == 3


def test_a_client_that_leaves_in_the_midst(bm25_index: Path) -> None:
    """Of a body in chunks, of many requests in a row: nothing is left of it."""
    body = b'{"queries": ["' + b"x" * 60_000
    with running(bm25_index, Limits()) as server:
        for content in (
            chunked([b" "] * 40_000),
            GET * 5000,
            post(body)[:-9],
            b"nonsense\r\n" * 9999,
        ):
            for _ in range(5):
                sent(address_of(server), content).close()
        end = time.monotonic() + 300
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert not server.server_state.connections
        assert not server.server_state.tasks
        health = httpx.get("http://{}:{}/health".format(*address_of(server)))
    assert health.status_code == 200


def connected(server: uvicorn.Server) -> list[Any]:
    """The server's connections, once there is one."""
    while not server.server_state.connections:
        time.sleep(0.01)
    return list(server.server_state.connections)


class Held:
    """An index that answers no search before ``answer`` is set."""

    def __init__(self, index: Any) -> None:
        self._index, self.searched, self.answer = index, 0, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def search(self, queries: Sequence[str], *more: Any) -> Any:
        self.searched += len(queries)
        assert self.answer.wait(300)
        return self._index.search(queries, *more)


def test_a_client_that_leaves_with_a_request_behind_is_not_searched_for(
    bm25_index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Held(open_index(bm25_index))
    with running(bm25_index, Limits(), slow) as server:
        url = "http://{}:{}".format(*address_of(server))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{url}/retrieve", json={"queries": ["film"]})
            while not slow.searched:
                time.sleep(0.01)
            for number in range(5):
                body = json.dumps({"queries": [f"river {number}"] * 3}).encode()
                sent(address_of(server), post(body) + GET).close()
            while len(server.server_state.connections) > 1:  # it has seen that they left
                time.sleep(0.01)
            slow.answer.set()
            assert first.result().status_code == 200
        end = time.monotonic() + 300
        while server.server_state.tasks and time.monotonic() < end:
            time.sleep(0.05)
        metrics = httpx.get(f"{url}/metrics").text
    assert slow.searched == 1
    assert 'sg_retrieval_requests_total{status="499"} 5.0' in metrics
    assert not caplog.records


def test_small_answers_that_nobody_reads_are_given_up_too(bm25_index: Path) -> None:
    """Less than a transport asks its protocol to wait for, on a connection that is to be closed."""
    with running(bm25_index, LIMITS) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address_of(server))
        (served,) = connected(server)
        while not served.transport.get_write_buffer_size():
            connection.sendall(GET * 5)
            time.sleep(0.002)
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        end = time.monotonic() + 300
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.1)
        assert not server.server_state.connections
        connection.close()


def test_a_head_behind_an_answer_that_nobody_reads_is_cut(bm25_index: Path) -> None:
    slow = Held(open_index(bm25_index))
    with running(bm25_index, Limits(), slow) as server:
        body = json.dumps({"queries": ["film"]}).encode()
        connection = sent(address_of(server), post(body) + HEAD)
        with pytest.raises(ConnectionError):
            connection.sendall(b"X-Padding: " + b"x" * 40_000_000)
        slow.answer.set()  # so it was cut before that request was answered


def test_what_is_no_http_is_counted_too(address: tuple[str, int]) -> None:
    assert received(sent(address, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
    text = httpx.get("http://{}:{}/metrics".format(*address)).text
    assert 'sg_retrieval_requests_total{status="400"} 1.0' in text


def test_many_headers_are_cut(address: tuple[str, int]) -> None:
    heads = b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * connections.MOST_HEADERS
    assert received(sent(address, heads + b"c: d\r\n\r\n")) == b""
    assert received(sent(address, heads[:-6] + CLOSE + b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


def test_an_upgrade_is_not_taken(address: tuple[str, int]) -> None:
    upgrade = (b"Connection: Upgrade, close", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join(upgrade) + b"\r\n\r\n"
    assert received(sent(address, request)).startswith(b"HTTP/1.1 200")


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


#: Requests that end at the same moment.
ENDS = 64


def test_no_turn_of_the_event_loop_is_long(bm25_index: Path) -> None:
    """Whatever is posted, `/health` waits for one turn.

    In processor time, and with ten times what it takes: bench/retrieval_health.py measures it.
    """
    stop = threading.Event()

    async def longest() -> float:
        worst = 0.0
        while not stop.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - before)
        return worst

    def attack(address: tuple[str, int], content: bytes, end: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            connection = sent(address, content)
            if end:
                together.wait()
                connection.sendall(end)
            received(connection)

    together = threading.Barrier(ENDS)
    # Clients enough for all of these to wait for one another.
    with running(bm25_index, Limits()) as server, ThreadPoolExecutor(ENDS) as pool:
        watch = asyncio.run_coroutine_threadsafe(longest(), server.servers[0].get_loop())
        to = address_of(server)
        halves = [sent(to, HEAD + b"\r\n{" * (n % 2)) for n in range(100)]
        contents = [post(body, CLOSE) for body in HOSTILE.values() for _ in range(4)]
        contents += [chunked([b"{"] * 200_000, CLOSE)] * 8
        contents += [(GET * 10_000 + post(b"", CLOSE))] * 4
        attacks = [pool.submit(attack, to, content) for content in contents]
        heads = post(b"{}", CLOSE, *[b"a:"] * (connections.MOST_HEADERS - 4))
        attacks += [pool.submit(attack, to, heads[:-4], heads[-4:]) for _ in range(ENDS)]
        for each in attacks:
            each.result()
        stop.set()
        worst = watch.result()
        for half in halves:
            half.close()
        health = httpx.get("http://{}:{}/health".format(*to))
    assert health.status_code == 200
    assert worst < 1.0, f"a turn of {1e3 * worst:.0f} ms"
