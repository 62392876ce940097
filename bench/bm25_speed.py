"""BM25 by analysis: how long an index takes to build, in how much memory, and queries per second.

    python bench/bm25_speed.py --data DIR --out bench/results/bm25_speed.json

DIR holds `corpus.jsonl` and questions; larger corpora are made of its words. `words` is what BM25
was before it was Lucene's.

A size that is left out of `--rows` stays in the file as it is.

build   in a process of its own: seconds, processor time, its peak memory, with what is mapped of
        the index, and that before it began.
search  another process, in batches of 64 different questions: queries per second, and processor
        time of one, with numpy and (compiled, what a server takes from 200,000 passages on) numba.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arguments import as_json
from children import FLAG, child
from machine import provenance
from retrieval_load import enlarge_corpus, make_queries

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval.analysis import ANALYSES

BATCH = 64


def peak_mb() -> float:
    """The most that this process has had in memory, in MB of 10^6 bytes."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return round(int(line.split()[1]) * 1.024e-3, 1)


def build(corpus: Path, rows: int, out: Path, analysis: str) -> dict[str, Any]:
    """A child: the index, built."""
    from sg_rlhf.retrieval import lexical

    before, start, cpu = peak_mb(), time.perf_counter(), time.process_time()
    lexical.build(corpus, rows, out, ANALYSES[analysis], progress=False)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_mb": peak_mb(),
        "libraries_mb": before,
        "index_mb": round(sum(path.stat().st_size for path in out.iterdir()) / 1e6, 1),
    }


def search(out: Path, analysis: str, queries: list[str], seconds: float) -> dict[str, Any]:
    """A child: the index, searched."""
    from sg_rlhf.retrieval.lexical import BM25Backend

    found: dict[str, Any] = {}
    for backend in ("numpy", "numba"):
        index = BM25Backend(out, ANALYSES[analysis], backend)  # type: ignore[arg-type]
        index.search(queries[:BATCH], 3)
        start, cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds:
            first = count % (len(queries) - BATCH)
            index.search(queries[first : first + BATCH], 3)
            count += BATCH
        found[backend] = {
            "queries_per_s": round(count / (time.perf_counter() - start), 1),
            "cpu_ms_per_query": round(1e3 * (time.process_time() - cpu) / count, 3),
        }
    return found


def be_child(part: str, *more: str) -> dict[str, Any]:
    """What the parent asked for."""
    if part == "build":
        corpus, rows, out, analysis = more
        return build(Path(corpus), int(rows), Path(out), analysis)
    out, analysis, data, seconds = more
    return search(Path(out), analysis, make_queries(Path(data)), float(seconds))


def main() -> None:
    """Measure and write the JSON."""
    if sys.argv[1:2] == [FLAG]:
        print(json.dumps(be_child(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=[7283, 100_000], help="passages")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a search (5)")
    args = parser.parse_args()
    result = provenance("bm25_speed.py", "bm25s", "numba", "numpy", "PyStemmer")
    result["command"] = "python bench/bm25_speed.py --data DIR --out FILE"
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    result["sizes"] = before.get("sizes", {})
    with tempfile.TemporaryDirectory() as work:
        for rows in args.rows:
            corpus = Path(work, f"{rows}.jsonl")
            enlarge_corpus(args.data / "corpus.jsonl", rows, corpus)
            entry = result["sizes"][str(rows)] = {"corpus_mb": corpus.stat().st_size / 1e6}
            for analysis in ANALYSES:
                out = Path(work, f"{rows}_{analysis}")
                entry[analysis] = {
                    "build": child(__file__, "build", corpus, rows, out, analysis),
                    "search": child(
                        __file__, "search", out, analysis, args.data.resolve(), args.seconds
                    ),
                }
                print(f"{rows:,} {analysis}: {json.dumps(entry[analysis])}", flush=True)
            write_whole(args.out, as_json(result))


if __name__ == "__main__":
    main()
