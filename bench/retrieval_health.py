"""How long `/health` of the retrieval server takes while hostile requests are sent to it.

    python bench/retrieval_health.py --data DIR --out FILE

DIR holds `corpus.jsonl`. A server of its own process on a BM25 index; `/health` is asked every 20
ms on one connection, and each hostile load runs for some seconds beside it:

nothing         nobody else asks
lists           bodies of 64 MiB of empty lists
strings         of one string, of 64 MiB, and of queries of 1 MiB
queries         16,384 different queries a request, eight requests at once
many            64 bodies of 16 MiB at once, of short queries
deep            a million opening brackets, of lists and of objects
chunks          bodies in chunks of one byte
heads           requests of which each has 15,000 headers of one letter
ends            300 such heads of which all end at the same moment, once a second
pipelined       requests of 18 bytes, thousands sent before the first answer is read
connections     connections that are opened and closed
same            the same 16,384 queries, from all
slow            200 connections of which each sends a byte every 50 ms
half            500 connections with half a head or half a body that never goes on
unread          eight answers of 60 MB that nobody reads
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from arguments import as_json
from machine import provenance
from retrieval_load import cpu_seconds, serving

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval.index import build

MIB = 2**20
EVERY = 0.02


def head(length: int | None) -> bytes:
    kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode()


class Load:
    """Connections to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def post(
        self, body: bytes | Iterator[bytes], pause: float = 0, stay: float | None = None
    ) -> None:
        """One request, however far the server lets it come; then its answer, or `stay` s."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                if isinstance(body, bytes):
                    body = iter([head(len(body)), body])
                for piece in body:
                    for start in range(0, len(piece), 4 * MIB):
                        writer.write(piece[start : start + 4 * MIB])
                        await writer.drain()
                    if pause:
                        await asyncio.sleep(pause)
                if stay is None:
                    await reader.read(65_536)
                else:
                    await asyncio.sleep(stay)
            finally:
                writer.close()

    async def pipeline(self, content: bytes) -> None:
        """Requests in a row, their answers read as they come."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(content)
            try:
                while await reader.read(MIB):
                    pass
            finally:
                writer.close()

    async def end_together(self, start: bytes, end: bytes) -> None:
        """A request whose end is sent when a second begins, as those of all others."""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(start)
                await asyncio.sleep(2 - time.time() % 1)
                writer.write(end)
                await reader.read(65_536)
            finally:
                writer.close()

    async def hold(self, content: bytes) -> None:
        """A connection that sends this and no more."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(content)
            try:
                await asyncio.sleep(60)
            finally:
                writer.close()


def queries(count: int, mark: str) -> bytes:
    asked = [f"{mark} {number} film river" for number in range(count)]
    return json.dumps({"queries": asked, "topk": 3}).encode()


def loads(load: Load) -> dict[str, Callable[[int], Awaitable[Any]]]:
    """What one client of each load does, by its number; done again and again."""
    lists = b'{"queries": [' + b"[]," * (64 * MIB // 3 - 10) + b"[]]}"
    empties = b'{"queries": [' + b'"",' * (16 * MIB // 3) + b'""]}'
    string = b'{"queries": ["' + b"x" * (64 * MIB - 30) + b'"]}'
    long = b'{"queries": [' + b",".join([b'"' + b"y" * (MIB - 99) + b'"'] * 60) + b"]}"
    many = {number: queries(16_384, f"q{number}") for number in range(8)}
    same = queries(16_384, "all")
    headers = head(2)[:-2] + b"a:\r\n" * 15_000
    large = json.dumps({"queries": ["film river war"] * 2600, "topk": 100, "return_scores": True})

    async def slow(number: int) -> None:
        body = b'{"queries": ["' + b"z" * 600 + b'"]}'
        await load.post(iter([head(len(body)), *(bytes([b]) for b in body)]), pause=0.05)

    async def chunks(_: int) -> None:
        piece = b"1\r\n \r\n" * 100_000
        await load.post(iter([head(None), *[piece] * 20]))

    async def half(number: int) -> None:
        await load.hold([b"POST /retr", head(90) + b'{"queries": ['][number % 2])

    return {
        "nothing": lambda _: asyncio.sleep(1),
        "lists": lambda _: load.post(lists),
        "strings": lambda number: load.post([string, long][number % 2]),
        "queries": lambda number: load.post(many[number]),
        "many": lambda _: load.post(empties),
        "deep": lambda number: load.post([b"[" * MIB, b'{"":' * (MIB // 4)][number % 2]),
        "chunks": chunks,
        "heads": lambda _: load.post(iter([headers + b"\r\n{}"])),
        "ends": lambda _: load.end_together(headers, b"\r\n{}"),
        "pipelined": lambda _: load.pipeline(b"GET / HTTP/1.1\r\n\r\n" * 20_000),
        "connections": lambda _: load.post(iter([b""]), stay=0),
        "same": lambda _: load.post(same),
        "slow": slow,
        "half": half,
        "unread": lambda _: load.post(large.encode(), stay=10),
    }


CLIENTS = {
    "nothing": 1, "lists": 4, "strings": 4, "queries": 8, "many": 64, "deep": 16, "chunks": 8,
    "heads": 64, "ends": 300, "pipelined": 16, "connections": 64, "same": 32,
    "slow": 200, "half": 500, "unread": 8,
}  # fmt: skip


async def health(url: str, seconds: float) -> list[float]:
    """Milliseconds of each question, one after the other."""
    found = []
    async with httpx.AsyncClient(timeout=60) as client:
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            (await client.get(url)).raise_for_status()
            found.append(1e3 * (time.perf_counter() - start))
            await asyncio.sleep(EVERY)
    return found


@contextlib.asynccontextmanager
async def under(one: Callable[[int], Awaitable[Any]], clients: int) -> AsyncIterator[None]:
    async def client(number: int) -> None:
        while True:
            await one(number)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attack(host: str, port: int, name: str, seconds: float) -> None:
    """A child: the load, so that what it costs does not hold up who asks `/health`."""
    one = loads(Load(host, port))[name]
    async with under(one, CLIENTS[name]):
        await asyncio.sleep(seconds)


async def measure(url: str, pid: int, seconds: float) -> dict[str, Any]:
    """Every load."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    found = {}
    for name, clients in CLIENTS.items():
        before = cpu_seconds(pid)
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--attack", host, port, name, str(seconds + 1)
        )
        await asyncio.sleep(2)  # it starts
        times = await health(url.replace("/retrieve", "/health"), seconds)
        await child.wait()
        found[name] = {
            "clients": clients,
            "asked": len(times),
            "p50_ms": round(float(np.percentile(times, 50)), 2),
            "p99_ms": round(float(np.percentile(times, 99)), 2),
            "max_ms": round(max(times), 2),
            "server_cpu_seconds": round(cpu_seconds(pid) - before, 2),
        }
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


#: What the loads are called in the docs.
TITLES = {
    "nothing": "nothing", "lists": "bodies of 64 MiB of empty lists",
    "strings": "strings of 64 MiB, queries of 1 MiB", "queries": "16,384 queries a request",
    "many": "16 MiB of short queries", "deep": "a million opening brackets",
    "chunks": "chunks of one byte", "heads": "15,000 headers of one letter",
    "ends": "such heads that all end at once", "pipelined": "20,000 requests of 18 bytes in a row",
    "connections": "connections opened and closed", "same": "the same 16,384 queries from all",
    "slow": "a byte every 50 ms", "half": "half requests", "unread": "60 MB that nobody reads",
}  # fmt: skip


def rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The docs' table."""
    for name, one in found.items():
        times = f"{one['p50_ms']:.1f} | {one['p99_ms']:.0f} | {one['max_ms']:.0f}"
        yield f"| {TITLES[name]} | {one['clients']} | {times} |"


def main() -> None:
    """Measure and write the JSON."""
    if sys.argv[1:2] == ["--attack"]:
        host, port, name, seconds = sys.argv[2:]
        asyncio.run(attack(host, int(port), name, float(seconds)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=8.0, help="a load (8)")
    args = parser.parse_args()
    result = provenance("retrieval_health.py", "uvicorn", "fastapi", "ijson")
    result["command"] = result["command"].replace(str(args.data), "DIR")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        build(args.data / "corpus.jsonl", "bm25", index, progress=False)
        with serving("-m", "sg_rlhf.retrieval.server", "--index", index) as (url, pid):
            result["loads"] = asyncio.run(measure(url, pid, args.seconds))
    write_whole(args.out, as_json(result))
    print(*rows(result["loads"]), f"wrote {args.out}", sep="\n")


if __name__ == "__main__":
    main()
