"""The retrieval server beside a plain one: throughput, latency, memory, growth.

    python bench/retrieval.py --data ../shared/data/qa --out bench/results/retrieval.json
    python bench/retrieval.py --data DIR --quick --out quick.json      # minutes; not to be quoted

DIR holds `corpus.jsonl`, `squad_dev.jsonl` and `hotpotqa_dev60.jsonl`. What is measured:

encoder  milliseconds a query alone and in batches, for three shapes: what batching can gain at all.
servers  queries/s and latency at 1, 16 and 64 clients, one query a request, every query different
         from the last ones and the cache off, so that batching alone makes the difference. Ours
         and the peer (`plain_retrieval_server.py`) take turns, round by round, on one encoder
         (random weights, seeded) and one faiss file; whether they answer alike is checked. The
         servers' CPU time a query is measured too: it does not depend on what else runs.
cache    the same with the cache on and each query asked by 8 clients, as a GRPO group does.
growth   the same at 64 clients, and memory, from the corpus itself to a million passages. The
         larger ones are made up: passages of shuffled words, vectors of the real ones with noise.

The load comes from this process on the same machine and takes its share of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp
import faiss
import numpy as np
import psutil
from machine import memory_gb, processor
from tqdm import tqdm

from sg_rlhf.retrieval import dense
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.encoder import Encoder
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.random_encoder import save_random_encoder

ROOT = Path(__file__).parents[1]
CLIENTS = (1, 16, 64)
GROUP = 8
#: Deep and narrow: alone, a query costs mostly the calls and not the arithmetic, as on a GPU.
ENCODER = {"width": 64, "layers": 6, "heads": 2, "vocabulary": 8000, "seed": 0}
#: Vectors long enough that a scan of a large index costs its arithmetic; E5's have 768 numbers.
GROWTH_ENCODER = {"width": 256, "layers": 2, "heads": 4, "vocabulary": 8000, "seed": 0}
#: Widths and layers for the encoder's own figures; the last is all-MiniLM's shape.
SHAPES = ((64, 6), (128, 4), (384, 6))


# ------------------------------------------------------------------------------------- the servers


@contextlib.contextmanager
def serving(*command: object) -> Iterator[tuple[str, int]]:
    """A server in a process of its own; gives its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [sys.executable, *map(str, command), "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
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
                sys.exit(f"{process.args} ended with status {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url):
                    return
            await asyncio.sleep(0.5)
    sys.exit(f"{process.args} did not answer within 10 minutes")


def ours(files: dict[str, Path], *more: object) -> tuple[object, ...]:
    """The command of our server, on a plain faiss file."""
    return (
        "-m", "sg_rlhf.retrieval.server", "--faiss-index", files["index"],
        "--corpus", files["corpus"], "--encoder", files["encoder"], *more,
    )  # fmt: skip


def plain(files: dict[str, Path]) -> tuple[object, ...]:
    """The command of the peer."""
    return (
        ROOT / "bench" / "plain_retrieval_server.py", "--faiss-index", files["index"],
        "--corpus", files["corpus"], "--encoder", files["encoder"], "--cache", files["cache"],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- the load


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


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
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


# ------------------------------------------------------------------------------ what is searched in


def encoder_costs(work: Path, corpus: Path, queries: list[str]) -> dict[str, Any]:
    """CPU milliseconds a query for encoders of several shapes, alone and in batches."""
    costs: dict[str, Any] = {}
    for width, layers in SHAPES:
        folder = work / f"encoder_{width}_{layers}"
        save_random_encoder(
            folder, iterate_contents(corpus), width=width, layers=layers, heads=width // 32,
            vocabulary=8000,
        )  # fmt: skip
        encoder = Encoder(str(folder), device="cpu")
        encoder.encode(queries[:64], "query")
        by_batch = {}
        for size in (1, 16, 64):
            start = time.process_time()
            for first in range(0, 256, size):
                encoder.encode(queries[first : first + size], "query")
            by_batch[str(size)] = round(1e3 * (time.process_time() - start) / 256, 3)
        costs[f"{width} wide, {layers} layers"] = by_batch
    return costs


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
    """A corpus of `rows` passages, the real ones first, then some of their words in other order."""
    texts = list(iterate_contents(source))
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


def enlarge(source: Path, rows: int, vectors: np.ndarray, folder: Path) -> dict[str, Path]:
    """An enlarged corpus and a flat faiss file of its vectors: the real ones, then near ones."""
    folder.mkdir()
    enlarge_corpus(source, rows, folder / "corpus.jsonl")
    noise = np.random.default_rng(0)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    for start in range(len(vectors), rows, 50_000):
        count = min(50_000, rows - start)
        near = vectors[noise.integers(len(vectors), size=count)]
        near = near + noise.standard_normal(near.shape, np.float32) / near.shape[1] ** 0.5
        index.add(near / np.linalg.norm(near, axis=1, keepdims=True))
    faiss.write_index(index, str(folder / "index.faiss"))
    return {"corpus": folder / "corpus.jsonl", "index": folder / "index.faiss"}


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


# ------------------------------------------------------------------------------------ measurements


def prepare(corpus: Path, folder: Path, shape: dict[str, int]) -> dict[str, Path]:
    """An encoder of random weights and a flat faiss file of the corpus's vectors."""
    encoder_folder = folder / "encoder"
    save_random_encoder(encoder_folder, iterate_contents(corpus), **shape)
    encoder = Encoder(str(encoder_folder), device="cpu")
    texts = list(iterate_contents(corpus))
    parts = []
    for start in tqdm(range(0, len(texts), 512), desc="encoding passages"):
        parts.append(encoder.encode(texts[start : start + 512], "passage"))
    np.save(folder / "vectors.npy", np.concatenate(parts))
    dense.build("flat", [folder / "vectors.npy"], len(texts), folder / "index.faiss")
    return {
        "corpus": corpus,
        "encoder": encoder_folder,
        "index": folder / "index.faiss",
        "cache": folder / "cache",
    }


def measure_growth(args: argparse.Namespace, work: Path, queries: list[str]) -> dict[str, Any]:
    """Throughput at 64 clients and memory by the number of passages."""
    files = prepare(args.data / "corpus.jsonl", work / "growth", GROWTH_ENCODER)
    small = faiss.read_index(str(files["index"]))
    vectors = small.reconstruct_n(0, small.ntotal)
    by_size: dict[str, Any] = {}
    for rows in (len(vectors), *args.sizes):
        enlarged = files
        if rows > len(vectors):
            made = enlarge(files["corpus"], rows, vectors, work / f"n{rows}")
            enlarged = {**files, **made, "cache": work / f"n{rows}" / "cache"}
        entry: dict[str, Any] = {"corpus_mb": size_mb(enlarged["corpus"])}
        with (
            serving(*ours(enlarged, "--cache-size", 0)) as (url, pid),
            serving(*plain(enlarged)) as (other_url, other_pid),
        ):
            label = f"flat, {rows:,} passages"
            both = {"ours": (url, pid), "plain": (other_url, other_pid)}
            flat = side_by_side(both, 64, queries, args.rounds, args.seconds, label)
            sample = queries[: args.compare]
            flat["answers"] = compare(
                asyncio.run(answers(url, sample, 64)), asyncio.run(answers(other_url, sample, 64))
            )
            flat["memory"] = {"ours": memory_mb(pid), "plain": memory_mb(other_pid)}
        flat["index_mb"] = size_mb(enlarged["index"])
        entry["flat"] = flat
        folder = work / f"bm25_{rows}"
        start = time.perf_counter()
        build(enlarged["corpus"], "bm25", folder)
        seconds = time.perf_counter() - start
        with serving("-m", "sg_rlhf.retrieval.server", "--index", folder, "--cache-size", 0) as (
            url,
            pid,
        ):
            bm25 = {
                str(clients): side_by_side(
                    {"ours": (url, pid)}, clients, queries, args.rounds, args.seconds,
                    f"BM25, {rows:,} passages",
                )["ours"]
                for clients in CLIENTS
            }  # fmt: skip
            bm25["memory"] = memory_mb(pid)
        bm25["index_mb"] = sum(size_mb(path) for path in folder.rglob("*.*") if path.is_file())
        bm25["build_seconds"] = round(seconds, 1)
        entry["bm25"] = bm25
        by_size[str(rows)] = entry
    return by_size


def per_million(growth: dict[str, Any]) -> dict[str, Any]:
    """MB a million passages, from the smallest and the largest size."""
    sizes = sorted(map(int, growth))
    small, large = growth[str(sizes[0])], growth[str(sizes[-1])]
    scale = 1e6 / max(1, sizes[-1] - sizes[0])

    def slope(*path: str) -> float:
        low: Any = small
        high: Any = large
        for key in path:
            low, high = low[key], high[key]
        return round((high - low) * scale, 1)

    return {
        "corpus_file": slope("corpus_mb"),
        "flat_index_file": slope("flat", "index_mb"),
        "bm25_index_files": slope("bm25", "index_mb"),
        "flat_ours_own": slope("flat", "memory", "ours", "own_mb"),
        "flat_ours_mapped": slope("flat", "memory", "ours", "mapped_mb"),
        "flat_plain_own": slope("flat", "memory", "plain", "own_mb"),
        "flat_plain_mapped": slope("flat", "memory", "plain", "mapped_mb"),
        "bm25_own": slope("bm25", "memory", "own_mb"),
        "bm25_mapped": slope("bm25", "memory", "mapped_mb"),
    }


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything; `work` is a folder for indexes, gone afterwards."""
    corpus = args.data / "corpus.jsonl"
    result: dict[str, Any] = {}
    queries = make_queries(args.data)

    files = prepare(corpus, work / "servers", ENCODER)
    result["encoder_cpu_ms_per_query"] = encoder_costs(work, corpus, queries)
    with (
        serving(*ours(files, "--cache-size", 0)) as (url, pid),
        serving(*plain(files)) as (other_url, other_pid),
    ):
        both = {"ours": (url, pid), "plain": (other_url, other_pid)}
        for target, _ in both.values():  # the first requests pay for threads and allocations
            asyncio.run(load(target, itertools.cycle(queries), 16, 2.0))
        sample = queries[: args.compare]
        result["answers"] = compare(
            asyncio.run(answers(url, sample, 64)), asyncio.run(answers(other_url, sample, 64))
        )
        result["servers"] = {
            str(clients): side_by_side(
                both, clients, queries, args.rounds, args.seconds, "cache off"
            )
            for clients in CLIENTS
        }
    grouped = [query for query in queries for _ in range(GROUP)]
    with serving(*ours(files)) as (url, pid):
        result["cache"] = {
            str(clients): side_by_side(
                {"ours": (url, pid)}, clients, grouped, args.rounds, args.seconds,
                f"cache on, each query {GROUP} times",
            )["ours"]
            for clients in CLIENTS
        }  # fmt: skip
    result["growth"] = measure_growth(args, work, queries)
    result["mb_per_million_passages"] = per_million(result["growth"])
    return result


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="a turn (8)")
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000],
        help="passages, beside the corpus itself (100000 1000000)")  # fmt: skip
    parser.add_argument("--compare", type=int, default=1000, help="queries to compare (1000)")
    parser.add_argument("--work", type=Path, help="where the indexes go, 5 GB (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one short turn, 20,000 passages")
    args = parser.parse_args()
    for name in ("corpus", "squad_dev", "hotpotqa_dev60"):
        if not (args.data / f"{name}.jsonl").is_file():
            parser.error(f"--data {args.data}: no {name}.jsonl in it")
    if args.quick:
        args.rounds, args.seconds, args.sizes, args.compare = 1, 3.0, [20_000], 200
    with tempfile.TemporaryDirectory(prefix="bench_retrieval.", dir=args.work) as work:
        figures = measure(args, Path(work))
    result = {
        "command": "python bench/retrieval.py --data DIR --rounds "
        f"{args.rounds} --seconds {args.seconds:g} --sizes {' '.join(map(str, args.sizes))}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gb": memory_gb(),
            "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        },
        "versions": {
            "python": platform.python_version(),
            **{
                name: metadata.version(name)
                for name in ("faiss-cpu", "bm25s", "torch", "transformers", "fastapi", "uvicorn")
            },
        },
        "encoder": {**ENCODER, "weights": "random"},
        "growth_encoder": {**GROWTH_ENCODER, "weights": "random"},
        **figures,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}; speed-up at 64 clients: {result['servers']['64']['speedup']}")


def size_mb(path: Path) -> float:
    """A file's size in MB (2**20 bytes)."""
    return round(path.stat().st_size / 2**20, 1)


if __name__ == "__main__":
    main()
