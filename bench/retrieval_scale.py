"""Indexes at the size that users have: time, memory, speed and recall of each kind.

    python bench/retrieval_scale.py --out bench/results/retrieval_scale.json
    python bench/retrieval_scale.py --rows 100000 --no-sparse --out quick.json    # not to be quoted

The vectors are made: clusters of about 50 on the unit sphere, a cosine of 0.5 between two of one
cluster, and queries are stored vectors with noise. So recall says how kinds and parameters compare,
and nothing about E5's vectors. Each kind is put into the file when it is measured, and what
`--kinds` leaves out stays as it is there: `--kinds hnsw --no-sparse` adds one. 40 minutes on two
cores in all.

build   `assemble` in a process of its own: seconds, its peak memory (VmHWM), that before it began
        with libraries loaded, and what the index command would have said (`foreseen_mb`), with
        these libraries and no encoder in it.
search  another process opens the file: seconds to open, queries/s one by one and 64 together, the
        10 best beside exact search, its own memory (RssAnon) and what it has mapped (RssFile).
sparse  a flat file as large as wiki-18's with nothing in it, which takes no disk: seconds to open,
        memory, and one query, which reads all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from arguments import as_json
from children import FLAG, child
from machine import provenance

from sg_rlhf.common import resources
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.index_sizes import (
    KINDS,
    PRECISIONS,
    PROCESS_BYTES,
    Precision,
    Spec,
    assemble_memory,
    spec,
)
from sg_rlhf.retrieval import assemble
from sg_rlhf.retrieval.dense import DenseBackend
from sg_rlhf.retrieval.recall import recall
from sg_rlhf.retrieval.vectors import VectorFile

WIKI, E5 = 21_015_324, 768
QUERIES, TOP = 256, 10
#: Kind, numbers of the vectors, and the search parameters that are tried.
CASES: tuple[tuple[str, Precision, str, tuple[int, ...]], ...] = (
    ("flat", "fp32", "", ()),
    ("flat", "fp16", "", ()),
    ("sq8", "fp16", "", ()),
    ("ivf", "fp32", "nprobe", (1, 16, 64, 256)),
    ("ivfsq8", "fp16", "nprobe", (1, 16, 64, 256)),
    ("ivfpq", "fp16", "nprobe", (1, 16, 64, 256)),
    ("hnsw", "fp32", "efSearch", (16, 64, 128, 256)),
)


class Made:
    """Stands where an encoder does: the vectors of queries are given."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def encode(self, texts: Any, kind: Any) -> np.ndarray:
        raise AssertionError("nothing is encoded here")


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make(folder: Path, rows: int, width: int, precision: Precision) -> VectorFile:
    """The vectors, in a file; the same for both precisions."""
    file = VectorFile(folder / f"{precision}.faiss", precision, rows, width)
    file.create()
    rng = np.random.default_rng(0)
    centres = unit(rng.standard_normal((max(1, rows // 50), width), np.float32))
    for start in range(0, rows, 50_000):
        count = min(50_000, rows - start)
        near = centres[rng.integers(len(centres), size=count)]
        noise = rng.standard_normal((count, width), np.float32) / width**0.5
        file.write(start, unit(near + noise))
    return file


def memory() -> dict[str, float]:
    """This process's, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kept = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"peak_mb": "VmHWM", "own_mb": "RssAnon", "mapped_mb": "RssFile"}
    return {key: round(int(kept[name].split()[0]) * 1.024e-3, 1) for key, name in names.items()}


def build(wanted: Spec, folder: Path) -> dict[str, Any]:
    """A child: the index, made."""
    file = VectorFile(
        folder / f"{wanted.vectors}.faiss", wanted.vectors, wanted.rows, wanted.dimension
    )
    before = memory()["peak_mb"]
    out = folder / wanted.kind / "index.faiss"
    out.parent.mkdir(exist_ok=True)
    start = time.perf_counter()
    if wanted.kind == "flat":
        # Writing is all there is to it, and `make` has done that.
        out.unlink(missing_ok=True)
        out.hardlink_to(file.path)
    else:
        assemble.assemble(wanted, file, out, progress=False)
    seconds = time.perf_counter() - start
    size = out.stat().st_size / 1e6
    own = assemble_memory(wanted, 0, resources.cores()) - PROCESS_BYTES
    return {
        "seconds": round(seconds, 1),
        "index_mb": round(size, 1),
        "peak_mb": memory()["peak_mb"],
        "foreseen_mb": round(before + own / 1e6, 1),
        "libraries_mb": before,
    }


def search(
    kind: str, name: str, values: tuple[int, ...], folder: Path, width: int
) -> dict[str, Any]:
    """A child: the index, searched."""
    path = folder / kind / "index.faiss"
    queries, expected = np.load(folder / "queries.npy"), np.load(folder / "exact.npy")
    rows = []
    start = time.perf_counter()
    backend = DenseBackend(path, Made(width))
    opened = time.perf_counter() - start
    for value in values or (0,):
        parameters = {name: value} if value else {}
        if value:
            backend = DenseBackend(path, Made(width), parameters)
        found = backend.search_vectors(queries, TOP)  # also brings the file into memory
        speeds = {}
        for size in (1, 64):
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 4:
                first = count % (QUERIES - size + 1)
                backend.search_vectors(queries[first : first + size], TOP)
                count += size
            speeds[f"queries_per_s_{size}"] = round(count / (time.perf_counter() - start), 1)
        rows.append({**parameters, "recall_at_10": recall(found, expected, TOP), **speeds})
    return {"open_seconds": round(opened, 3), "searched": rows, **memory()}


def sparse(folder: Path) -> dict[str, Any]:
    """A child: a flat file of wiki-18's size, opened and searched once."""
    file = VectorFile(folder / "sparse.faiss", "fp32", WIKI, E5)
    file.create()
    start = time.perf_counter()
    backend = DenseBackend(file.path, Made(E5))
    opened, at_start = time.perf_counter() - start, memory()
    query = unit(np.random.default_rng(0).standard_normal((1, E5), np.float32))
    # Every score is 0 there, so that the search for ties would read it again and again.
    start = time.perf_counter()
    backend._find(query, 19)
    return {
        "rows": WIKI,
        "width": E5,
        "file_gb": round(file.size / 1e9, 2),
        "disk_mb": round(file.path.stat().st_blocks * 512 / 1e6, 2),
        "open_seconds": round(opened, 3),
        "own_mb_when_open": at_start["own_mb"],
        "query_seconds": round(time.perf_counter() - start, 1),
        **memory(),
    }


def be_child(part: str, folder: Path, *more: str) -> dict[str, Any]:
    """What the parent asked for."""
    if part == "sparse":
        return sparse(folder)
    case, rows, width = CASES[int(more[0])], int(more[1]), int(more[2])
    if part == "build":
        return build(spec(case[0], rows, width, case[1]), folder)
    return search(case[0], case[2], case[3], folder, width)


def measure(args: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
    """Everything, kind by kind."""
    rng = np.random.default_rng(1)
    cases = [case for case in CASES if case[0] in args.kinds]
    for precision in PRECISIONS:
        if precision not in {"fp32", *(case[1] for case in cases)}:
            continue
        file = make(folder, args.rows, args.width, precision)
        if precision == "fp32":
            picked = np.sort(rng.choice(args.rows, QUERIES, replace=False))
            near = np.concatenate([file.read(row, row + 1) for row in picked.tolist()])
            noise = rng.standard_normal(near.shape, np.float32) / args.width**0.5
            queries = unit(near + noise)
            np.save(folder / "queries.npy", queries)
            backend = DenseBackend(file.path, Made(args.width))
            best = [rows for rows, _ in backend.search_vectors(queries, TOP)]
            np.save(folder / "exact.npy", np.stack(best))
        file.close()
    for case in cases:
        kind, precision, _, _ = case
        more = (folder, CASES.index(case), args.rows, args.width)
        found = {
            "build": child(__file__, "build", *more),
            "search": child(__file__, "search", *more),
        }
        save(args.out, {**result, "kinds": {f"{kind} {precision}": found}})
        print(f"{kind} {precision}: {json.dumps(found)}", flush=True)
        for path in (folder / kind).iterdir():
            path.unlink()


def save(out: Path, result: dict[str, Any]) -> None:
    """Put what was measured into the file; what is there of the same vectors stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(out.read_text()) if out.exists() else {}
    if any(before.get(key) != result[key] for key in ("rows", "width")):
        before = {}
    result = {**before, **result, "kinds": {**before.get("kinds", {}), **result.get("kinds", {})}}
    write_whole(out, as_json(result))


def main() -> None:
    """Measure and write the JSON."""
    if sys.argv[1:2] == [FLAG]:
        part, folder, *more = sys.argv[2:]
        print(json.dumps(be_child(part, Path(folder), *more)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rows", type=int, default=1_000_000, help="vectors (1000000)")
    parser.add_argument("--width", type=int, default=256, help="numbers of each (256)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-sparse", action="store_true", help="without the file of 21 M")
    parser.add_argument("--work", type=Path, help="where indexes go, 5 GB (a temporary folder)")
    args = parser.parse_args()
    result = provenance("retrieval_scale.py", "faiss-cpu", "torch", "numpy")
    result["command"] = "python bench/retrieval_scale.py --out FILE"
    result |= {"rows": args.rows, "width": args.width}
    with tempfile.TemporaryDirectory(prefix="retrieval_scale.", dir=args.work) as work:
        if not args.no_sparse:
            result["wiki_18_sparse"] = child(__file__, "sparse", work)
            print(f"sparse: {json.dumps(result['wiki_18_sparse'])}", flush=True)
            (Path(work) / "sparse.faiss").unlink()
            save(args.out, result)
        measure(args, Path(work), result)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
