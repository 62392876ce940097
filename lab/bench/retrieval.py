"""The retrieval server beside a plain one, at three widths of vectors and three sizes of index.

    python lab/bench/retrieval.py --data DIR --out lab/bench/results/retrieval.json
    python lab/bench/retrieval.py --data DIR --quick --out quick.json   # a minute; not to be quoted

DIR holds `corpus.jsonl`, `squad_dev.jsonl` and `hotpotqa_dev60.jsonl`. Both servers search one flat
faiss file with one encoder (random weights, seeded); larger corpora are made of the words of the
real one, and vectors are those of questions with noise. What is measured:

grid     queries/s of 64 clients, one query a request, every query different from the last ones and
         the cache off, so that what is done for a query makes the difference. Ours and the peer
         (`plain_retrieval_server.py`) take turns. Whether they answer alike is checked; so is the
         processor time of a query, and memory.
clients  the same with 1 and 16 clients, at the smallest size and width.
cache    the same with the cache on and each query asked by 8 clients, as a GRPO group does.

The load comes from this process on the same machine and takes its share of the cores. The largest
cell has 3 GB of vectors, which the peer copies into its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from lab.bench.common import as_json, provenance
from lab.bench.random_encoder import save_random_encoder
from lab.bench.retrieval_load import (
    ROOT,
    answers,
    compare,
    enlarge_corpus,
    load,
    make_queries,
    memory_mb,
    serving,
    side_by_side,
)
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.encoder import Encoder

#: Width of the vectors, layers and heads of the encoder. Deep and narrow costs calls more than
#: arithmetic, as on a GPU; E5-base is 768 wide, with 12 layers.
SHAPES = ((64, 6, 2), (256, 2, 4), (768, 2, 12))
SIZES = (7_283, 100_000, 1_000_000)
CLIENTS = 64
GROUP = 8
#: Questions whose vectors the stored ones are made of.
CENTRES = 512


def ours(files: dict[str, Path], *more: object) -> tuple[object, ...]:
    """The command of our server, on a plain faiss file."""
    return (
        "-m", "sg_rlhf.retrieval.server", "--faiss-index", files["index"],
        "--corpus", files["corpus"], "--encoder", files["encoder"], *more,
    )  # fmt: skip


def plain(files: dict[str, Path]) -> tuple[object, ...]:
    """The command of the peer."""
    return (
        ROOT / "lab" / "bench" / "plain_retrieval_server.py", "--faiss-index", files["index"],
        "--corpus", files["corpus"], "--encoder", files["encoder"], "--cache", files["cache"],
    )  # fmt: skip


def encoder(folder: Path, corpus: Path, shape: tuple[int, int, int]) -> Path:
    """An encoder of a shape, with random weights."""
    width, layers, heads = shape
    texts = iterate_contents(corpus)
    save_random_encoder(folder, texts, width=width, layers=layers, heads=heads, vocabulary=8000)
    return folder


def vectors(path: Path, rows: int, centres: np.ndarray) -> Path:
    """A flat faiss file: vectors of questions with noise, a cosine of about 0.7 to them."""
    width = centres.shape[1]
    index = faiss.IndexFlatIP(width)
    rng = np.random.default_rng(0)
    for start in range(0, rows, 50_000):
        count = min(50_000, rows - start)
        noise = rng.standard_normal((count, width), np.float32) / width**0.5
        near = centres[rng.integers(len(centres), size=count)] + noise
        index.add((near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32))
    faiss.write_index(index, str(path))
    return path


def cell(
    files: dict[str, Path], queries: list[str], args: argparse.Namespace, label: str
) -> dict[str, Any]:
    """Both servers on the same files."""
    with (
        serving(*ours(files, "--cache-size", 0)) as (url, pid),
        serving(*plain(files)) as (other_url, other_pid),
    ):
        # The first requests pay for threads, for allocations, and for reading a file.
        sample = queries[: args.compare]
        alike = compare(
            asyncio.run(answers(url, sample, CLIENTS)),
            asyncio.run(answers(other_url, sample, CLIENTS)),
        )
        both = {"ours": (url, pid), "plain": (other_url, other_pid)}
        found = side_by_side(both, CLIENTS, queries, args.rounds, args.seconds, label)
        found["answers"] = alike
        found["memory"] = {"ours": memory_mb(pid), "plain": memory_mb(other_pid)}
    return found


def few_clients(
    files: dict[str, Path], queries: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Both servers with 1 and 16 clients."""
    with (
        serving(*ours(files, "--cache-size", 0)) as ours_at,
        serving(*plain(files)) as plain_at,
    ):
        both = {"ours": ours_at, "plain": plain_at}
        for url, _ in both.values():
            asyncio.run(load(url, itertools.cycle(queries), 16, 2.0))
        return {
            str(clients): side_by_side(
                both, clients, queries, args.rounds, args.seconds, f"{clients} clients"
            )
            for clients in (1, 16)
        }


def cached(files: dict[str, Path], queries: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Ours with its cache, each query asked by several clients."""
    grouped = [query for query in queries for _ in range(GROUP)]
    with serving(*ours(files)) as ours_at:
        found = side_by_side(
            {"ours": ours_at}, CLIENTS, grouped, args.rounds, args.seconds, "cache on"
        )
    own: dict[str, Any] = found["ours"]
    return own


def measure(args: argparse.Namespace, work: Path, result: dict[str, Any]) -> None:
    """Everything; `work` is a folder for indexes, gone afterwards."""
    source = args.data / "corpus.jsonl"
    queries = make_queries(args.data)
    encoders = {shape: encoder(work / f"e{shape[0]}", source, shape) for shape in SHAPES}
    centres = {
        shape: Encoder(str(folder), device="cpu").encode(queries[-CENTRES:], "query")
        for shape, folder in encoders.items()
    }
    result["grid"] = []
    for rows in args.sizes:
        folder = work / str(rows)
        folder.mkdir()
        files = {"corpus": folder / "corpus.jsonl", "cache": folder / "cache"}
        enlarge_corpus(source, rows, files["corpus"])
        for shape in SHAPES:
            width, layers, _ = shape
            files["encoder"] = encoders[shape]
            files["index"] = vectors(folder / "index.faiss", rows, centres[shape])
            if not result["grid"]:
                result["clients"] = few_clients(files, queries, args)
                result["cache"] = cached(files, queries, args)
            label = f"{rows:,} passages, {width} wide"
            entry = {"passages": rows, "width": width, "layers": layers}
            result["grid"].append({**entry, **cell(files, queries, args, label)})
            write_whole(args.out, as_json(result))
            files["index"].unlink()


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server (2)")
    parser.add_argument("--seconds", type=float, default=5.0, help="a turn (5)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES),
        help="passages (7283 100000 1000000)")  # fmt: skip
    parser.add_argument("--compare", type=int, default=128, help="queries to compare (128)")
    parser.add_argument("--work", type=Path, help="where the indexes go, 5 GB (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one short turn, 7,283 passages")
    args = parser.parse_args()
    for name in ("corpus", "squad_dev", "hotpotqa_dev60"):
        if not (args.data / f"{name}.jsonl").is_file():
            parser.error(f"--data {args.data}: no {name}.jsonl in it")
    if args.quick:
        args.rounds, args.seconds, args.sizes = 1, 3.0, [SIZES[0]]
    result = provenance(
        "lab/bench/retrieval.py", "faiss-cpu", "torch", "transformers", "fastapi", "uvicorn"
    )
    result["command"] = result["command"].replace(str(args.data), "DIR")
    with tempfile.TemporaryDirectory(prefix="bench_retrieval.", dir=args.work) as work:
        measure(args, Path(work), result)
    print(f"wrote {args.out}; speed-ups: {[cell['speedup'] for cell in result['grid']]}")


if __name__ == "__main__":
    main()
