"""Build a retrieval index: `python -m sg_rlhf.retrieval.index --corpus FILE --encoder E --out DIR`.

Everything is written to `DIR.partial` and renamed at the end. Dense vectors are written there shard
by shard, so that a killed build, started again, goes on after the last whole shard.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sg_rlhf.common.files import write_whole
from sg_rlhf.retrieval import contents, dense, manifest
from sg_rlhf.retrieval.analysis import ANALYSES, LUCENE, of_revision
from sg_rlhf.retrieval.command import Parser, positive, run
from sg_rlhf.retrieval.corpus import Corpus, save_offsets, scan

SHARDS, PLAN = "shards", "plan.json"
#: What an index folder holds beside its manifest.
INDEX = (manifest.BM25, manifest.FAISS, manifest.OFFSETS)
PROG = "sg_rlhf.retrieval.index"
EPILOG = """\
examples:
  python -m sg_rlhf.retrieval.index --corpus corpus.jsonl --encoder bm25 --out indexes/bm25
  python -m sg_rlhf.retrieval.index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --type flat --out indexes/e5_flat

which one:
  bm25   words in common, as Lucene and pyserini count them; no GPU, no model, seconds for a small
         corpus
  flat   exact search by meaning; a batch of queries reads every vector once (64.6 GB for wiki-18)
  hnsw   a graph, nearly exact, reads few vectors; about 0.27 KB a passage more than flat
  ivf    clusters, nearly exact; quicker to build than hnsw, slower to search

A corpus line is {"id": "0", "contents": "\\"Title\\"\\ntext"}, as Search-R1 publishes it. A build
that was killed goes on where it was when the same command is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = _parser().parse_args(argv)
    return run(PROG, lambda: build(**vars(args)))


@dataclass(frozen=True)
class Build:
    """What to build; the fields are the command's flags."""

    corpus: Path
    encoder: str
    out: Path
    type: str | None = None
    analysis: str | None = None
    revision: str | None = None
    max_length: int = 256
    batch_size: int | None = None
    shard_rows: int = 16_384
    device: str | None = None
    force: bool = False
    restart: bool = False
    progress: bool = True

    @property
    def partial(self) -> Path:
        """The folder of the unfinished index."""
        return self.out.with_name(f"{self.out.name}.partial")


def build(corpus: Path, encoder: str, out: Path, **options: Any) -> None:
    """What the command does; `options` are the other fields of `Build`.

    Raises:
        ValueError: for a bad argument or corpus; `out` stays as it was.
    """
    job = Build(corpus, encoder, out, **options)
    if encoder == "bm25" and job.type is not None:
        raise ValueError(f"--type {job.type}: BM25 has one form, leave --type out")
    if encoder != "bm25" and job.analysis is not None:
        raise ValueError(f"--analysis {job.analysis}: of --encoder bm25 alone, leave it out")
    if not corpus.is_file():
        raise ValueError(f"--corpus {corpus}: no such file")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file, expected a folder")
    job.partial.mkdir(parents=True, exist_ok=True)
    with _locked(job.partial):
        try:
            made = _build_partial(job)
        except (ValueError, OSError):
            _remove_unless_shards(job.partial)
            raise
        if made is None:
            _remove_unless_shards(job.partial)
            print(f"{out}: built already")
            return
        _put_in_place(job.partial, out)
    size = sum(made["files"].values())
    print(f"{out}: {made['corpus']['rows']:,} passages, {made['kind']}, {size:,} bytes")


def _build_partial(job: Build) -> dict[str, Any] | None:
    """Make the whole index in `job.partial`; its manifest, or None if `out` is that index."""
    _clean(job.partial, keep=("lock", SHARDS, PLAN))
    # Before the corpus is read: that may take minutes.
    model = None if job.encoder == "bm25" else _load_encoder(job)
    found = scan(job.corpus, progress=job.progress)
    rows = len(found.offsets) - 1
    request: dict[str, Any] = {
        "kind": "bm25" if model is None else job.type or "flat",
        "corpus": manifest.corpus_entry(job.corpus, job.out, rows, found.sha256),
        "encoder": _encoder_entry(job, model),
    }
    if not job.force and _is_built(job, request):
        return None
    if model is None:
        # numba takes seconds to import, and dense indexes need none of it.
        from sg_rlhf.retrieval import lexical

        folder = job.partial / manifest.BM25
        analysis = ANALYSES[job.analysis or LUCENE.name]
        facts = lexical.build(job.corpus, rows, folder, analysis, progress=job.progress)
    else:
        shards = _encode(job, model, Corpus(job.corpus, found.offsets), request)
        file = job.partial / manifest.FAISS
        facts = dense.build(request["kind"], shards, rows, file, progress=job.progress)
    save_offsets(job.partial / manifest.OFFSETS, found.offsets)
    libraries = ("bm25s",) if model is None else ("faiss-cpu", "torch", "transformers")
    made = {
        **request,
        "parameters": facts,
        **contents.describe(
            job.partial, manifest.files_of(job.partial, INDEX), progress=job.progress
        ),
        "versions": {name: metadata.version(name) for name in libraries},
    }
    manifest.write(job.partial, made)
    return made


def _encoder_entry(job: Build, model: Any) -> dict[str, Any]:
    """The manifest's part about the encoder; `path` is where a local one lies from `out`."""
    if model is None:
        return ANALYSES[job.analysis or LUCENE.name].identity
    entry = {**model.identity, "max_length": job.max_length}
    if Path(job.encoder).is_dir():
        entry["path"] = os.path.relpath(Path(job.encoder).resolve(), job.out.resolve())
    return entry


def _load_encoder(job: Build) -> Any:
    # torch and transformers take seconds to import, and BM25 needs neither.
    from sg_rlhf.retrieval.encoder import Encoder

    return Encoder(job.encoder, job.revision, job.max_length, job.device)


def _is_built(job: Build, request: dict[str, Any]) -> bool:
    """Whether `out` is the result of this request already; refuses to replace anything else."""
    out = job.out
    if not out.exists() or not any(out.iterdir()):
        return False
    try:
        built = manifest.read(out)
    except ValueError as error:
        raise ValueError(f"--out {out}: not empty, and {error} (--force replaces it)") from None
    if _identity(built) == _identity(request):
        return True
    analysis = of_revision(built["encoder"].get("revision"))
    of_same_passages = _identity(built)[:2] == _identity(request)[:2]
    if analysis and of_same_passages and job.analysis is None:
        # Of an older version: it can be searched, so whoever did not ask for another keeps it.
        print(f"{out}: analysis {analysis.name}; --analysis {LUCENE.name} --force changes it")
        return True
    described = built["encoder"]["model"] + (f", analysis {analysis.name}" if analysis else "")
    raise ValueError(
        f"--out {out}: holds another index ({built['kind']} of {described}, "
        f"corpus SHA-256 {built['corpus']['sha256'][:16]}); --force replaces it"
    )


def _identity(request: dict[str, Any]) -> list[Any]:
    """What makes two builds the same.

    Where the encoder lies is no part of it, nor an analysis' name, which its revision implies.
    """
    encoder = {k: v for k, v in request["encoder"].items() if k not in ("path", "analysis")}
    return [request["kind"], request["corpus"]["sha256"], encoder]


def _encode(job: Build, model: Any, corpus: Corpus, request: dict[str, Any]) -> list[Path]:
    """All passages as vector shards, those of an interrupted build used again."""
    # The kind of index is no part of it: the same vectors serve a flat and an HNSW index.
    _, corpus_sha256, encoder = _identity(request)
    plan = {"corpus_sha256": corpus_sha256, "encoder": encoder, "shard_rows": job.shard_rows}
    folder, plan_file = job.partial / SHARDS, job.partial / PLAN
    if job.restart:
        shutil.rmtree(folder, ignore_errors=True)
        plan_file.unlink(missing_ok=True)
    if plan_file.exists():
        before = json.loads(plan_file.read_text(encoding="utf-8"))
        for key, value in plan.items():
            if before.get(key) != value:
                raise ValueError(
                    f"{job.partial}: an unfinished build with {key} {before.get(key)}, "
                    f"this one has {value}; give the same arguments to go on with it, "
                    "or --restart to drop it"
                )
    else:
        write_whole(plan_file, json.dumps(plan, indent=2))
    folder.mkdir(exist_ok=True)
    shards = []
    starts = range(0, len(corpus), job.shard_rows)
    if done := len(list(folder.glob("*.npy"))):
        print(f"{job.partial}: going on after {done} of {len(starts)} shards", flush=True)
    with tqdm(
        total=len(corpus), desc="encoding", unit="passage", disable=None if job.progress else True
    ) as bar:
        for number, start in enumerate(starts):
            rows = range(start, min(start + job.shard_rows, len(corpus)))
            shard = folder / f"{number:06d}.npy"
            if not shard.exists():
                vectors = model.encode(corpus.contents(rows), "passage", job.batch_size)
                temporary = shard.with_suffix(".tmp")
                with temporary.open("wb") as file:
                    np.save(file, vectors)
                    os.fsync(file.fileno())
                temporary.rename(shard)
            shards.append(shard)
            bar.update(len(rows))
    return shards


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keep a second build away from the same folder; a killed one leaves no lock behind."""
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another build is writing here") from None
        yield


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder; shards, and what it replaces, are removed after that."""
    old = out.with_name(f"{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _clean(out, keep=(*INDEX, manifest.NAME))
    shutil.rmtree(old, ignore_errors=True)


def _clean(folder: Path, keep: Sequence[str]) -> None:
    """Remove everything else."""
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_unless_shards(partial: Path) -> None:
    """Leave no folder behind where nothing was gained; finished shards are kept."""
    if not any(partial.glob("shards/*.npy")):
        shutil.rmtree(partial)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {PROG}", "Build the index that the retrieval server searches.", EPILOG
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="FILE", help="passages, a JSON object a line")
    add("--encoder", required=True, metavar="{bm25,MODEL}",
        help="bm25, or an E5 model: a Hugging Face id or a folder")  # fmt: skip
    add("--type", choices=dense.TYPES, help="kind of dense index (flat)")
    add("--analysis", choices=ANALYSES,
        help="words of bm25: stems as in Lucene, or words as they are (lucene)")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    add("--revision", help="commit or tag of a Hugging Face model (its newest)")
    add("--max-length", type=positive, default=256, help="tokens a text; the rest is cut off (256)")
    add("--batch-size", type=positive, help="passages a forward pass (64 on a CPU, 256 on a GPU)")
    add("--shard-rows", type=positive, default=16_384,
        help="passages between two points where a killed build can go on (16384)")  # fmt: skip
    add("--device", help="torch device (a GPU if there is one)")
    add("--force", action="store_true", help="replace another index in DIR")
    add("--restart", action="store_true", help="drop an unfinished build of other arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
