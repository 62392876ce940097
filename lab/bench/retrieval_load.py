"""What benchmarks of the retrieval server share: servers, clients, corpora and queries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from tqdm import tqdm

from sg_rlhf.retrieval.corpus import iterate_contents

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def serving(*command: object) -> Iterator[tuple[str, int]]:
    """A server in a process of its own; gives its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [sys.executable, *map(str, command), "--port", str(port)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        # Ours asks for it itself. The peer has it too, or the load's own share of the cores
        # would decide between them.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    # In a session of its own: Linux then gives each server the same share of a busy machine,
    # whatever its number of threads.
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        asyncio.run(answering(f"http://127.0.0.1:{port}/health", process))
        yield f"http://127.0.0.1:{port}/retrieve", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def answering(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server is up."""
    async with aiohttp.ClientSession() as session:
        for _ in range(1200):
            if process.poll() is not None:
                sys.exit(f"{process.args!r} ended with status {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url):
                    return
            await asyncio.sleep(0.5)
    sys.exit(f"{process.args!r} did not answer within 10 minutes")


async def load(url: str, queries: Iterator[str], clients: int, seconds: float) -> dict[str, float]:
    """`clients` ask one query after the other for `seconds`; queries/s and latencies in ms."""
    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=clients)
    # Nobody waits for ever; a server that takes a minute for a query has failed the measurement.
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        end = time.perf_counter() + seconds

        async def client() -> None:
            while (start := time.perf_counter()) < end:
                body = {"queries": [next(queries)], "topk": 3, "return_scores": True}
                async with session.post(url, json=body) as response:
                    response.raise_for_status()
                    await response.read()
                latencies.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        elapsed = time.perf_counter() - start
    return {
        "queries_per_s": len(latencies) / elapsed,
        "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
        "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
        "queries": len(latencies),
    }


async def answers(url: str, queries: list[str], clients: int) -> list[list[tuple[str, float]]]:
    """Id and score of what each query finds, asked by `clients` at a time."""
    gate = asyncio.Semaphore(clients)
    async with aiohttp.ClientSession() as session:

        async def one(query: str) -> list[tuple[str, float]]:
            body = {"queries": [query], "topk": 3, "return_scores": True}
            async with gate, session.post(url, json=body) as response:
                [hits] = (await response.json())["result"]
            return [(hit["document"]["id"], hit["score"]) for hit in hits]

        return await asyncio.gather(*(one(query) for query in queries))


def compare(mine: list[Any], other: list[Any]) -> dict[str, Any]:
    """How far two servers' answers agree."""
    differences = [
        abs(a[1] - b[1])
        for hits, others in zip(mine, other, strict=True)
        for a, b in zip(hits, others, strict=True)
    ]
    same = sum(
        [i for i, _ in hits] == [i for i, _ in others]
        for hits, others in zip(mine, other, strict=True)
    )
    return {
        "queries": len(mine),
        "same_passages_in_the_same_order": same,
        "largest_score_difference": max(differences),
    }


def median_of(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure over the rounds, and the range of the throughput."""
    speeds = [one["queries_per_s"] for one in rounds]
    return {
        **{name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]},
        "queries_per_s_range": [round(min(speeds), 2), round(max(speeds), 2)],
    }


def side_by_side(
    servers: dict[str, tuple[str, int]],
    clients: int,
    queries: list[str],
    rounds: int,
    seconds: float,
    label: str,
) -> dict[str, Any]:
    """Servers in turns, so that a machine that slows down slows all of them."""
    endless = itertools.cycle(queries)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, (url, pid) in servers.items():
            before = cpu_seconds(pid)
            figures = asyncio.run(load(url, endless, clients, seconds))
            figures["cpu_ms_per_query"] = 1e3 * (cpu_seconds(pid) - before) / figures["queries"]
            found[name].append(figures)
    result: dict[str, Any] = {name: median_of(some) for name, some in found.items()}
    if {"ours", "plain"} <= set(servers):
        mine, other = result["ours"], result["plain"]
        result["speedup"] = round(mine["queries_per_s"] / other["queries_per_s"], 2)
        cpu = other["cpu_ms_per_query"] / mine["cpu_ms_per_query"]
        result["cpu_time_ratio"] = round(cpu, 2)
    shown = ", ".join(
        f"{name} {one['queries_per_s']:.0f}/s at {one['cpu_ms_per_query']:.1f} ms of CPU"
        for name, one in ((name, result[name]) for name in servers)
    )
    tqdm.write(f"{label}, {clients} clients: {shown}")
    return result


def make_queries(data: Path) -> list[str]:
    """All different and as long as a search query: questions, then the starts of passages."""
    questions = [
        json.loads(line)["question"]
        for name in ("squad_dev", "hotpotqa_dev60")
        for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    starts = [
        " ".join(text.split("\n", 1)[-1].split()[:10])
        for text in iterate_contents(data / "corpus.jsonl")
    ]
    queries = list(dict.fromkeys(query for query in questions + starts if query.strip()))
    random.Random(0).shuffle(queries)
    return queries


def enlarge_corpus(source: Path, rows: int, path: Path) -> None:
    """A corpus of `rows` passages, the real ones first, then their words in another order."""
    texts = list(iterate_contents(source))[:rows]
    words = [word for text in texts for word in text.split("\n", 1)[-1].split()]
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for row in tqdm(range(rows), desc=f"making {rows:,} passages", disable=None):
            if row < len(texts):
                text = texts[row]
            else:
                start = rng.randrange(len(words) - 80)
                body = words[start : start + 80]
                rng.shuffle(body)
                text = f'"Made up {row}"\n{" ".join(body)}'
            file.write(json.dumps({"id": str(row), "contents": text}) + "\n")


def cpu_seconds(pid: int) -> float:
    """Processor time that a server has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def memory_mb(pid: int) -> dict[str, float]:
    """A process's own memory, and the pages of mapped files that it has touched."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) / 1024
    own = found["Anonymous"]
    return {"own_mb": round(own, 1), "mapped_mb": round(found["Rss"] - own, 1)}
