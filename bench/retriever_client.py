"""What the retriever's client costs a rollout engine: processor time a query, queries/s, latency.

    python bench/retriever_client.py --data DIR --before e682199 \
        --out bench/results/retriever_client.json

DIR holds `corpus.jsonl` and `squad_dev.jsonl`. As many dialogues as given search at once, in one
event loop as an engine has; every query differs from those before. The server is ours, over BM25,
in a process of its own without a cache; both share the machine. `before` is the client of that
commit of this repository.

back_to_back   a dialogue asks again as soon as it is answered: as many queries as the server takes.
scattered      it thinks in between, for random times of 1 s on average: queries come one by one.

`cpu_ms` is the client's process alone, its event loop and the dialogues' own steps included.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIALOGUES = (64, 512, 1024)
THINKS_S = {"back_to_back": 0.0, "scattered": 1.0}


def main() -> None:
    args = arguments()
    if args.worker:
        print(json.dumps(asyncio.run(load(args))))
        return
    from arguments import as_json
    from machine import provenance

    from sg_rlhf.common.atomic_io import write_whole
    from sg_rlhf.retrieval.index import build
    from sg_rlhf.tasks.search.retriever.serving import serve

    result: dict[str, Any] = provenance("retriever_client.py", "aiohttp", "httpx")
    result |= {"before": args.before, "rounds": args.rounds, "seconds": args.seconds}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        queries = write_queries(args.data, work)
        sources = {"now": ROOT}
        if args.before:
            sources["before"] = unpacked(args.before, work / "before")
        build(args.data / "corpus.jsonl", "bm25", work / "index", progress=False)
        with serve(work / "index", "--cache-size", "0") as url:
            result["modes"] = {
                mode: {
                    str(count): measured(args, sources, url, queries, mode, count)
                    for count in DIALOGUES
                }
                for mode in THINKS_S
            }
    write_whole(args.out, as_json(result))


def measured(
    args: argparse.Namespace,
    sources: dict[str, Path],
    url: str,
    queries: Path,
    mode: str,
    count: int,
) -> dict[str, Any]:
    """Medians over rounds, in which the clients take turns."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(args.rounds):
        for name, source in sources.items():
            command = [
                sys.executable, __file__, "--worker", "--url", url, "--queries", queries,
                "--dialogues", count, "--thinks", THINKS_S[mode], "--seconds", args.seconds,
            ]  # fmt: skip
            done = subprocess.run(
                list(map(str, command)), env={**os.environ, "PYTHONPATH": str(source)},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            rounds[name].append(json.loads(done.stdout))
    found = {
        name: {key: round(statistics.median(one[key] for one in some), 3) for key in some[0]}
        for name, some in rounds.items()
    }
    print(mode, count, json.dumps(found), flush=True)
    return found


async def load(args: argparse.Namespace) -> dict[str, float]:
    """Dialogues that search for so many seconds, after two of warming up."""
    from sg_rlhf.tasks.search.retriever.client import RetrieverClient
    from sg_rlhf.tasks.search.settings import SearchSettings

    client = RetrieverClient.from_settings(SearchSettings(url=args.url, timeout_s=60.0))
    queries = json.loads(args.queries.read_text(encoding="utf-8"))
    random.shuffle(queries)
    unasked = itertools.cycle(queries)
    latencies: list[float] = []

    async def dialogue(end: float) -> None:
        rng = random.Random()
        if args.thinks:
            await asyncio.sleep(rng.uniform(0.0, args.thinks))
        while (start := time.perf_counter()) < end:
            await client.search(next(unasked))
            latencies.append(time.perf_counter() - start)
            if args.thinks:
                await asyncio.sleep(rng.expovariate(1 / args.thinks))

    async def all_of(seconds: float) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(dialogue(end) for _ in range(args.dialogues)))

    await all_of(2.0)
    latencies.clear()
    start, cpu = time.perf_counter(), time.process_time()
    await all_of(args.seconds)
    cpu, elapsed = time.process_time() - cpu, time.perf_counter() - start
    await client.aclose()
    found = sorted(latencies)
    return {
        "cpu_ms": 1e3 * cpu / len(found),
        "queries_per_s": len(found) / elapsed,
        "p50_ms": 1e3 * found[len(found) // 2],
        "p99_ms": 1e3 * found[len(found) * 99 // 100],
    }


def write_queries(data: Path, work: Path) -> Path:
    """Questions, then the starts of passages."""
    questions = [
        json.loads(line)["question"]
        for line in (data / "squad_dev.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    passages = (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    starts = [
        " ".join(json.loads(line)["contents"].split("\n", 1)[-1].split()[:10]) for line in passages
    ]
    path = work / "queries.json"
    path.write_text(json.dumps(list(dict.fromkeys(filter(str.strip, questions + starts)))))
    return path


def unpacked(commit: str, folder: Path) -> Path:
    """The package as it was."""
    packed = subprocess.run(
        ["git", "archive", commit, "sg_rlhf"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path)
    add("--before", metavar="COMMIT", help="whose client is measured too")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=5.0, help="of each round")
    add("--out", type=Path)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("url", str), ("queries", Path), ("dialogues", int), ("thinks", float)):
        add(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker and not (args.data and args.out):
        parser.error("expected --data DIR and --out FILE")
    return args


if __name__ == "__main__":
    main()
