"""Build a retrieval index: `python -m sg_rlhf.retrieval.index --corpus FILE --encoder E --out DIR`.

Everything is written to `DIR.partial` and renamed at the end. A dense build that was killed
continues after its last whole shard of vectors (`dense_build`).
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import path, positive_int, printable_name
from sg_rlhf.common.atomic_io import best_effort_output, write_whole
from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.command import Parser, run, setting, threads
from sg_rlhf.retrieval.corpus import save_offsets, scan

if TYPE_CHECKING:
    from sg_rlhf.retrieval.encoder import Encoder

LOCK = "lock"
#: In `OUT.partial`: what an unfinished build encodes, and its shards of vectors.
PLAN, VECTORS = "plan.json", "vectors"
#: In `OUT.partial`: the index that a finished build replaces, for a moment.
REPLACED = "replaced"
#: The files and folders of an index, without its manifest.
INDEX = (manifest.BM25, manifest.FAISS, manifest.OFFSETS)
PROG = "sg_rlhf.retrieval.index"
EPILOG = """\
examples:
  python -m sg_rlhf.retrieval.index --corpus corpus.jsonl --encoder bm25 --out indexes/bm25
  python -m sg_rlhf.retrieval.index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --out indexes/e5_flat
  python -m sg_rlhf.retrieval.index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --factory "IVF16384,SQ8" --search nprobe=64 --out indexes/e5_ivf

--factory is faiss's index_factory string, for example:
  Flat            exact search; 4 bytes per number (64.6 GB for wiki-18)
  SQfp16          exact search of float16 vectors; 2 bytes per number
  HNSW32          graph, nearly exact; --search efSearch=N
  IVF16384,SQ8    inverted lists, nearly exact; 1 byte per number; --search nprobe=N
  IVF16384,PQ96   inverted lists; 96 bytes per vector; loses some recall

A corpus line is {"id": "0", "contents": "\\"Title\\"\\ntext"}, as Search-R1 publishes it. If a
dense build is killed, run the same command again: finished shards are kept.
"""


@dataclass(frozen=True)
class Build:
    """The index to build; the fields are the command's flags."""

    corpus: Path
    encoder: str
    out: Path
    factory: str | None = None
    search: Mapping[str, int] = field(default_factory=dict)
    revision: str | None = None
    max_length: int = 256
    encoder_dtype: str = "auto"
    prompts: str | None = None
    batch_size: int | None = None
    shard_rows: int = 16_384
    device: str | None = None
    workers: int | None = None
    skip_room_check: bool = False
    force: bool = False
    restart: bool = False

    @property
    def partial(self) -> Path:
        """The folder of the unfinished index."""
        return self.out.with_name(f"{self.out.name}.partial")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = vars(_parser().parse_args(argv))
    args["search"] = dict(args["search"])
    with best_effort_output():
        return run(PROG, lambda: build(**args))


def build(corpus: Path, encoder: str, out: Path, **options: Any) -> None:
    """Build an index; `options` are the other fields of `Build`.

    Raises:
        ValueError: a bad argument or corpus; `out` stays as it was.
    """
    job = Build(corpus, encoder, out, **options)
    _check(job)
    job.partial.mkdir(parents=True, exist_ok=True)
    with _locked(job.partial):
        try:
            made = _build_partial(job)
        except (ValueError, OSError):
            _remove_without_vectors(job.partial)
            raise
        if made is None:
            _remove_without_vectors(job.partial)
            print(f"{out}: built already")
            return
        _put_in_place(job.partial, out)
    size = sum(made["files"].values())
    print(f"{out}: {made['corpus']['rows']:,} passages, {made['kind']}, {size:,} bytes")


def _check(job: Build) -> None:
    """Refuse bad arguments before anything is read."""
    if job.encoder == "bm25" and (job.factory or job.search):
        raise ValueError("--encoder bm25: has no --factory and no --search, leave them out")
    devices = [] if job.device is None else job.device.split(",")
    if not all(devices):
        raise ValueError(f"--device {job.device}: expected names separated by commas")
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


def _build_partial(job: Build) -> dict[str, Any] | None:
    """Make the whole index in `job.partial`; its manifest, or None if `out` is that index."""
    _clean(job.partial, keep=(LOCK, PLAN, VECTORS))
    model = index = None
    if job.encoder != "bm25":
        # torch and transformers take seconds to import, and BM25 needs neither.
        from sg_rlhf.retrieval import dense_build

        # Before the corpus is read, which may take minutes.
        model = _encoder(job)(dense_build.devices(job.device)[0])
        index, search = dense_build.new_index(job.factory or "Flat", model.dimension, job.search)
    found = scan(job.corpus)
    rows = len(found.offsets) - 1
    request: dict[str, Any] = {
        "kind": "bm25" if model is None else job.factory or "Flat",
        "corpus": manifest.corpus_entry(job.corpus, job.out, rows, found.sha256),
        "encoder": _encoder_entry(job, model),
    }
    if not job.force and _is_built(job, request):
        return None
    save_offsets(job.partial / manifest.OFFSETS, found.offsets)
    if model is None or index is None:
        # numba takes seconds to import, and dense indexes do not need it.
        from sg_rlhf.retrieval import bm25

        request |= bm25.build(job.corpus, job.partial / manifest.BM25)
    else:
        _build_dense(job, request, model, index)
        request["search"] = search
    libraries = ("bm25s",) if model is None else ("faiss-cpu", "torch", "transformers")
    request |= {
        **manifest.describe_files(job.partial, INDEX),
        "versions": {name: metadata.version(name) for name in libraries},
    }
    manifest.write(job.partial, request)
    return request


def _build_dense(job: Build, request: Mapping[str, Any], model: Encoder, index: Any) -> None:
    """Encode the missing shards and write the faiss index."""
    from sg_rlhf.retrieval import dense_build

    factory, rows = request["kind"], request["corpus"]["rows"]
    _plan(job, request, model)
    shards = dense_build.Shards(
        job.partial.resolve() / VECTORS, job.corpus.resolve(),
        job.partial.resolve() / manifest.OFFSETS, rows, job.shard_rows, _encoder(job),
        job.batch_size,
    )  # fmt: skip
    shards.folder.mkdir(exist_ok=True)
    missing = len(shards.missing)
    if not job.skip_room_check:
        # The shards, and an index of at most their size.
        disk = (missing * job.shard_rows + rows) * 4 * model.dimension
        resources.check_disk("--out", job.out, "the build", disk)
    count = -(-rows // job.shard_rows)
    if missing < count:
        print(f"{job.partial}: continuing after {count - missing} of {count} shards", flush=True)
    where = dense_build.places(dense_build.devices(job.device), job.workers)
    with tqdm(
        total=rows, initial=rows - min(rows, missing * job.shard_rows), desc="encoding",
        unit="passage", disable=None,
    ) as bar:  # fmt: skip
        dense_build.encode(shards, where[: max(1, missing)], model, bar.update)
    dense_build.fill_index(index, factory, shards, job.partial / manifest.FAISS)


def _plan(job: Build, request: Mapping[str, Any], model: Encoder) -> None:
    """Write what the shards are of, or check that those of a killed build are of the same.

    Raises:
        ValueError: an unfinished build of something else is there.
    """
    file = job.partial / PLAN
    encoder = {key: value for key, value in request["encoder"].items() if key != "path"}
    wanted = {
        "corpus_sha256": request["corpus"]["sha256"],
        "encoder": {**encoder, "dtype": model.dtype},
        "shard_rows": job.shard_rows,
    }
    if job.restart or not file.exists():
        # Shards without a plan are of an unknown build.
        file.unlink(missing_ok=True)
        shutil.rmtree(job.partial / VECTORS, ignore_errors=True)
        write_whole(file, json.dumps(wanted, indent=2), sync=True)
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    for key, value in wanted.items():
        if before.get(key) != value:
            raise ValueError(
                f"{job.partial}: an unfinished build with {key} {before.get(key)}, this one has "
                f"{value}; give the same arguments to continue it, or --restart to drop it"
            )


def _encoder_entry(job: Build, model: Encoder | None) -> dict[str, Any]:
    """The manifest's entry of the encoder."""
    if model is None:
        from sg_rlhf.retrieval import bm25

        return bm25.IDENTITY
    entry: dict[str, Any] = {
        **model.identity,
        "max_length": job.max_length,
        "prompts": dict(model.prompts),
    }
    if "fingerprint" in entry:  # a folder, whose path may be of use
        entry["path"] = os.path.relpath(Path(job.encoder).resolve(), job.out.resolve())
    return entry


def _encoder(job: Build) -> Callable[[str], Encoder]:
    """What loads the encoder on a device; it can be sent to another process."""
    from sg_rlhf.retrieval.encoder import Encoder

    return functools.partial(
        Encoder, job.encoder, job.revision, job.max_length, dtype=job.encoder_dtype,
        prompts=job.prompts,
    )  # fmt: skip


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
    prompts = manifest.prompts_of(built["encoder"])
    same = not isinstance(prompts, dict) or prompts == request["encoder"].get("prompts")
    if same and _identity(built) == _identity(request):
        if job.search and built.get("search") != job.search:
            manifest.write(out, {**built, "search": dict(job.search)})
            shown = " ".join(f"{name}={value}" for name, value in job.search.items())
            print(f"{out}: is searched with {shown} from now on")
        return True
    raise ValueError(
        f"--out {out}: holds another index ({built['kind']} of {built['encoder']['model']}, "
        f"corpus SHA-256 {built['corpus']['sha256'][:16]}); --force replaces it"
    )


def _identity(request: dict[str, Any]) -> list[Any]:
    """The identity of a build, without the encoder's location and dtype."""
    # Older manifests have no prompts.
    left_out = ("path", "dtype", "prompts")
    encoder = {k: v for k, v in request["encoder"].items() if k not in left_out}
    return [request["kind"].lower(), request["corpus"]["sha256"], encoder]


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keep a second build away from the same folder; a killed one leaves no lock behind."""
    with (partial / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another build is writing here") from None
        yield


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder; shards, and the index that it replaces, are removed after."""
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


def _remove_without_vectors(partial: Path) -> None:
    """Remove the folder of a failed build, unless it has finished shards."""
    if not any((partial / VECTORS).glob("*.npy")):
        shutil.rmtree(partial)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(f"python -m {PROG}", "Build a search index of a corpus.", EPILOG)
    add = parser.add_argument
    add("--corpus", type=path, required=True, metavar="FILE",
        help="passages, one JSON object per line (required)")  # fmt: skip
    add("--encoder", type=printable_name, required=True, metavar="{bm25,MODEL}",
        help="bm25, or a text encoder: a Hugging Face id or a folder (required)")  # fmt: skip
    add("--factory", type=printable_name, metavar="STRING",
        help="kind of dense index, as a faiss index_factory string (default: Flat)")  # fmt: skip
    add("--search", type=setting, nargs="+", default=[], metavar="NAME=N",
        help="search parameter of the index (default: efSearch=128; nprobe a quarter of the lists, "
        "at most 256)")  # fmt: skip
    add("--out", type=path, required=True, metavar="DIR", help="folder for the index (required)")
    add("--revision", type=printable_name, metavar="R",
        help="commit, branch or tag of the encoder on the hub (default: the newest)")  # fmt: skip
    add("--max-length", type=positive_int, default=256, metavar="N",
        help="tokens per text; the encoder does not read the rest (default: 256)")  # fmt: skip
    add("--batch-size", type=positive_int, metavar="N",
        help="passages per forward pass (default: 64 on a CPU, 256 on a GPU)")  # fmt: skip
    add("--shard-rows", type=positive_int, default=16_384, metavar="N",
        help="passages per shard, the unit that a restarted build keeps "
        "(default: 16384)")  # fmt: skip
    add("--encoder-dtype", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="number type of the encoder (default: fp16 on a GPU, fp32 on a CPU)")  # fmt: skip
    add("--prompts", choices=("e5", "none"),
        help="prompts of an encoder whose files name none: e5 is `query: ` and `passage: ` "
        "(default: e5 for E5's ids on the hub and for models without sentence-transformers "
        "files)")  # fmt: skip
    add("--device", "--devices", type=printable_name, metavar="DEVICE[,DEVICE]",
        help="cpu, or GPUs such as cuda:0,cuda:1 (default: every GPU, else the CPU)")  # fmt: skip
    add("--workers", type=threads, metavar="N",
        help="processes that encode, on the CPU or per GPU "
        "(default: one per 8 cores; 1 per GPU)")  # fmt: skip
    add("--skip-room-check", action="store_true",
        help="build although the disk may be too small (default: refuse)")  # fmt: skip
    add("--force", action="store_true",
        help="replace an index in --out; other files are never replaced "
        "(default: refuse)")  # fmt: skip
    add("--restart", action="store_true",
        help="delete an unfinished build with other arguments (default: refuse)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
