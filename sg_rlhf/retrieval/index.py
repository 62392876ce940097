"""Build a retrieval index: `python -m sg_rlhf.retrieval.index --corpus FILE --encoder E --out DIR`.

Everything is written to `DIR.partial` and renamed at the end. Before a build its size, memory and
time are printed, and what the machine cannot hold is refused (`room`). A killed build, started
again, goes on where it was (`dense_build`, `postings`).
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sg_rlhf.common.argument_types import path, positive_int, printable_name
from sg_rlhf.common.atomic_io import best_effort_output
from sg_rlhf.common.index_sizes import KINDS, PRECISIONS, Spec, check_codes, spec
from sg_rlhf.retrieval import contents, manifest, room, unfinished
from sg_rlhf.retrieval.analysis import ANALYSES, LUCENE, of_revision
from sg_rlhf.retrieval.command import Parser, run, setting, threads
from sg_rlhf.retrieval.corpus import Corpus, scan
from sg_rlhf.retrieval.job import KEPT, SPLIT, Build

if TYPE_CHECKING:
    from sg_rlhf.retrieval.encoder import Encoder

LOCK = "lock"
#: Where the index that a finished build replaces lies for a moment, inside `OUT.partial`.
REPLACED = "replaced"
#: What an index folder holds beside its manifest.
INDEX = (manifest.BM25, manifest.FAISS, manifest.OFFSETS)
PROG = "sg_rlhf.retrieval.index"
EPILOG = """\
examples:
  python -m sg_rlhf.retrieval.index --corpus corpus.jsonl --encoder bm25 --out indexes/bm25
  python -m sg_rlhf.retrieval.index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --type flat --out indexes/e5_flat
  python -m sg_rlhf.retrieval.index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --type hnsw --vectors fp16 --build M=64 --search efSearch=256 --out indexes/e5_hnsw --dry-run

which one, and its parameters:
  bm25    words in common, as Lucene and pyserini count them; no GPU, no model, seconds for a small
          corpus
  flat    exact search by meaning; a batch of queries reads every vector once (64.6 GB for wiki-18)
  sq8     the same of a byte a number
  hnsw    a graph, nearly exact, reads few vectors; --build M efConstruction, --search efSearch
  ivf     lists, nearly exact; quicker to build than hnsw, slower to search; nlist, nprobe
  ivfsq8  lists of vectors of a byte a number; nlist, nprobe
  ivfpq   lists of 2 to 4 % of the size, which lose some; nlist, pq_m, pq_bits, nprobe
Recall beside exact search is measured when an index is made, and is in its manifest.

A corpus line is {"id": "0", "contents": "\\"Title\\"\\ntext"}, as Search-R1 publishes it. A build
that was killed goes on where it was when the same command is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = vars(_parser().parse_args(argv))
    for name in ("build", "search"):
        args[name] = dict(args[name])
    with best_effort_output():
        return run(PROG, lambda: build(**args))


def build(corpus: Path, encoder: str, out: Path, **options: Any) -> None:
    """What the command does; `options` are the other fields of `Build`.

    Raises:
        ValueError: for a bad argument or corpus; `out` stays as it was.
    """
    job = Build(corpus, encoder, out, **options)
    _check(job)
    if job.dry_run:
        _room(job, None if encoder == "bm25" else _load_encoder(job))
        return
    job.partial.mkdir(parents=True, exist_ok=True)
    with _locked(job.partial) as lock:
        try:
            made = _build_partial(job, lock)
        except (ValueError, OSError):
            _remove_unless_parts(job)
            raise
        if made is None:
            _remove_unless_parts(job)
            print(f"{out}: built already")
            return
        _put_in_place(job.partial, out)
    size = sum(made["files"].values())
    print(f"{out}: {made['corpus']['rows']:,} passages, {made['kind']}, {size:,} bytes")
    for line in _recall_lines(made):
        print(line)


def _check(job: Build) -> None:
    """Refuse what can be seen to be wrong before anything is read."""
    if job.encoder == "bm25":
        for flag in ("type", "vectors", "build", "search"):
            if value := getattr(job, flag):
                shown = value if isinstance(value, str) else next(iter(value))
                raise ValueError(f"--{flag} {shown}: BM25 has one form, leave --{flag} out")
    elif job.analysis is not None:
        raise ValueError(f"--analysis {job.analysis}: of --encoder bm25 alone, leave it out")
    devices = [] if job.device is None else job.device.split(",")
    if not all(devices):
        raise ValueError(f"--device {job.device}: expected names with a comma between two of them")
    if len(devices) > 1 and any(device.startswith("cpu") for device in devices):
        raise ValueError(f"--device {job.device}: expected cpu alone (--workers N), or GPUs")
    if not job.corpus.is_file():
        raise ValueError(f"--corpus {job.corpus}: no such file")
    if job.out.exists() and not job.out.is_dir():
        raise ValueError(f"--out {job.out}: is a file, expected a folder")
    if job.out.resolve() in (Path("/"), Path.cwd()):
        raise ValueError(f"--out {job.out}: expected a folder to make, as indexes/NAME")
    above = next(folder for folder in job.out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"--out {job.out}: {above} is a file, expected a folder")
    if job.partial.is_dir() and _names(job.partial) and not (job.partial / LOCK).exists():
        raise ValueError(
            f"--out {job.out}: {job.partial}, where the build would write, is no unfinished build; "
            "move it away, or give another --out"
        )
    if job.force:
        _check_replaceable(job.out)


def _check_replaceable(out: Path) -> None:
    """Refuse to replace a folder that holds anything but an index: it would be deleted."""
    others = sorted(_names(out) - {*INDEX, manifest.NAME}) if out.is_dir() else []
    if others:
        raise ValueError(
            f"--out {out}: {others[0]} in it is no part of an index and would be deleted; move it "
            "away, or give another --out"
        )


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _build_partial(job: Build, lock: IO[Any]) -> dict[str, Any] | None:
    """Make the whole index in `job.partial`; its manifest, or None if `out` is that index."""
    _clean(job.partial, keep=(LOCK, *KEPT))
    # Before the corpus is read: that may take minutes.
    model = None if job.encoder == "bm25" else _load_encoder(job)
    # What is there may be this very index, which takes no room.
    early = job.force or not (job.out / manifest.NAME).exists()
    if early:
        _room(job, model)
    found = unfinished.known_scan(job) or scan(job.corpus, progress=job.progress)
    rows = len(found.offsets) - 1
    wanted = None if model is None else _spec(job, rows, model)
    request: dict[str, Any] = {
        "kind": "bm25" if wanted is None else wanted.kind,
        "corpus": manifest.corpus_entry(job.corpus, job.out, rows, found.sha256),
        "encoder": _encoder_entry(job, model),
    }
    if wanted is not None:
        request |= {
            "vectors": wanted.vectors,
            "parameters": dict(wanted.build),
            "search": dict(wanted.search),
        }
    if not job.force and _is_built(job, request):
        return None
    if not early:
        _room(job, model)
    if model is None or wanted is None:
        # numba takes seconds to import, and dense indexes need none of it.
        from sg_rlhf.retrieval import lexical

        unfinished.plan(job, found, request, {})
        folder, parts = job.partial / manifest.BM25, job.partial / SPLIT
        analysis = ANALYSES[job.analysis or LUCENE.name]
        request["parameters"] = lexical.build(
            job.corpus, rows, folder, analysis, parts, progress=job.progress
        )
    else:
        from sg_rlhf.retrieval import dense_build

        request |= dense_build.build(job, wanted, model, found, request, lock)
    libraries = ("bm25s",) if model is None else ("faiss-cpu", "torch", "transformers")
    files = manifest.files_of(job.partial, INDEX)
    request |= {
        **contents.describe(job.partial, files, progress=job.progress),
        "versions": {name: metadata.version(name) for name in libraries},
    }
    manifest.write(job.partial, request)
    return request


def _room(job: Build, model: Encoder | None) -> None:
    """Print what the build takes, and refuse what this machine has not."""
    corpus = Corpus(job.corpus, scan(job.corpus, check=False, progress=job.progress).offsets)
    if model is None:
        needs = room.of_bm25(job, corpus)
    else:
        needs = room.of_vectors(job, _spec(job, len(corpus), model), corpus, model)
    room.check(job, needs, len(corpus))


def _spec(job: Build, rows: int, model: Encoder) -> Spec:
    kind = job.type or "flat"
    made = spec(kind, rows, model.dimension, job.vectors, job.build, job.search)
    check_codes(made)
    return made


def _recall_lines(made: dict[str, Any]) -> Iterator[str]:
    """What the manifest says of recall."""
    if "recall" not in made:
        return
    yield f"found of the exact 10 best, {made['recall']['queries']} queries of pieces of passages:"
    for row in made["recall"]["measured"]:
        settings = _shown({k: v for k, v in row.items() if k in made["search"]})
        yield f"  {settings:<14} {row['recall_at_10']:.3f}   {row['ms_per_query']:.2f} ms a query"


def _encoder_entry(job: Build, model: Encoder | None) -> dict[str, Any]:
    """The manifest's part about the encoder."""
    if model is None:
        return ANALYSES[job.analysis or LUCENE.name].identity
    from sg_rlhf.retrieval import dense_build

    return dense_build.encoder_entry(job, model)


def _load_encoder(job: Build) -> Encoder:
    # torch, transformers and faiss take seconds to import, and BM25 needs none of them.
    from sg_rlhf.retrieval import dense_build

    return dense_build.load_encoder(job)


def _is_built(job: Build, request: dict[str, Any]) -> bool:
    """Whether `out` is the result of this request already; refuses to replace anything else."""
    out = job.out
    if not out.exists() or not any(out.iterdir()):
        return False
    try:
        built = manifest.read(out)
    except ValueError as error:
        raise ValueError(
            f"--out {out}: not empty, and {error} (--force replaces a damaged index, and nothing "
            "else)"
        ) from None
    # One from before there were parameters has those of its time, which nothing says.
    same_form = "vectors" not in built or _form(built) == _form(request)
    if _identity(built) == _identity(request) and same_form:
        if job.search and built.get("search") != request["search"]:
            manifest.write(out, {**built, "search": request["search"]})
            print(f"{out}: is searched with {_shown(request['search'])} from now on")
        return True
    analysis = of_revision(built["encoder"].get("revision"))
    of_same_passages = _identity(built)[:2] == _identity(request)[:2]
    if analysis and of_same_passages and job.analysis is None:
        # Of an older version: it can be searched, so whoever did not ask for another keeps it.
        print(f"{out}: analysis {analysis.name}; --analysis {LUCENE.name} --force changes it")
        return True
    described = built["encoder"]["model"] + (f", analysis {analysis.name}" if analysis else "")
    if "vectors" in built:
        described += f", {_form(built)}"
    raise ValueError(
        f"--out {out}: holds another index ({built['kind']} of {described}, "
        f"corpus SHA-256 {built['corpus']['sha256'][:16]}); --force replaces it"
    )


def _identity(request: dict[str, Any]) -> list[Any]:
    """What makes two builds the same.

    Where the encoder lies is no part of it, nor what it computed with, nor an analysis' name, which
    its revision implies.
    """
    left_out = ("path", "analysis", "dtype")
    encoder = {k: v for k, v in request["encoder"].items() if k not in left_out}
    return [request["kind"], request["corpus"]["sha256"], encoder]


def _form(request: dict[str, Any]) -> str:
    """What two indexes of the same vectors may differ in."""
    return " ".join([request["vectors"], _shown(request["parameters"])]).strip()


def _shown(parameters: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in parameters.items())


@contextmanager
def _locked(partial: Path) -> Iterator[IO[Any]]:
    """Keep a second build away from the same folder; a killed one leaves no lock behind."""
    with (partial / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another build is writing here") from None
        yield lock


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder; shards, and what it replaces, are removed after that."""
    _check_replaceable(out)  # again: a build may take hours
    if out.exists():
        out.rename(partial / REPLACED)
    partial.rename(out)
    _clean(out, keep=(*INDEX, manifest.NAME))


def _clean(folder: Path, keep: Sequence[str]) -> None:
    """Remove everything else."""
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove_unless_parts(job: Build) -> None:
    """Leave no folder behind where nothing was gained; finished shards are kept."""
    if not job.has_parts:
        shutil.rmtree(job.partial)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {PROG}", "Build the index that the retrieval server searches.", EPILOG
    )
    add = parser.add_argument
    add("--corpus", type=path, required=True, metavar="FILE", help="passages, a JSON object a line")
    add("--encoder", type=printable_name, required=True, metavar="{bm25,MODEL}",
        help="bm25, or an E5 model: a Hugging Face id or a folder")  # fmt: skip
    add("--type", choices=KINDS, help="kind of dense index (flat)")
    add("--vectors", choices=PRECISIONS,
        help="numbers of flat, hnsw, ivf (fp32); of others while they are made (fp16)")  # fmt: skip
    add("--build", type=setting, nargs="+", default=[], metavar="NAME=N",
        help="parameters of the index, see below")  # fmt: skip
    add("--search", type=setting, nargs="+", default=[], metavar="NAME=N",
        help="parameters that it is searched with unless the server is told others")  # fmt: skip
    add("--analysis", choices=ANALYSES,
        help="words of bm25: stems as in Lucene, or words as they are (lucene)")  # fmt: skip
    add("--out", type=path, required=True, metavar="DIR", help="folder to make")
    add(
        "--revision", type=printable_name, help="commit or tag of a Hugging Face model (its newest)"
    )
    add(
        "--max-length",
        type=positive_int,
        default=256,
        help="tokens a text; the rest is cut off (256)",
    )
    add(
        "--batch-size",
        type=positive_int,
        help="passages a forward pass (64 on a CPU, 256 on a GPU)",
    )
    add("--shard-rows", type=positive_int, default=16_384,
        help="passages between two points where a killed build can go on (16384)")  # fmt: skip
    add("--encoder-dtype", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="numbers that the encoder computes with (fp16 on a GPU, fp32 on a CPU)")  # fmt: skip
    add("--device", "--devices", type=printable_name, metavar="DEVICE[,DEVICE]",
        help="cpu, or GPUs as cuda:0,cuda:1; a process each (every GPU there is)")  # fmt: skip
    add("--workers", type=threads, metavar="N",
        help="processes on a CPU, sharing its cores (one for 8), or on each GPU (1)")  # fmt: skip
    add("--dry-run", action="store_true", help="print sizes, memory and time, and build nothing")
    add("--skip-room-check", action="store_true", help="build what disk or memory may not hold")
    add("--force", action="store_true", help="replace another index in DIR, and nothing else")
    add("--restart", action="store_true", help="drop an unfinished build of other arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
