"""Build a retrieval index: `sg-rlhf index --corpus FILE --encoder E --out DIR`.

Everything is written to `DIR.partial` and renamed at the end. A dense build that was killed
continues where it stopped (`dense_build`).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import path, positive_int, printable_name
from sg_rlhf.common.atomic_io import best_effort_output
from sg_rlhf.common.text import Removed
from sg_rlhf.retrieval import command, manifest
from sg_rlhf.retrieval.corpus import Corpus, save_offsets, scan

if TYPE_CHECKING:
    from sg_rlhf.retrieval.encoder import Encoder

LOCK = "lock"
#: In `OUT.partial`: the start of the name of a file of vectors.
VECTORS = "vectors_"
#: The files and folders of an index, without its manifest.
INDEX = (manifest.BM25, manifest.FAISS, manifest.OFFSETS)
PROG = "sg-rlhf index"
EPILOG = """\
examples:
  sg-rlhf index --corpus corpus.jsonl --encoder bm25 --out indexes/bm25
  sg-rlhf index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --out indexes/e5_flat
  sg-rlhf index --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 \\
      --factory "IVF16384,SQ8" --out indexes/e5_ivf

--factory is faiss's index_factory string, for example:
  Flat            exact search; 4 bytes per number (64.6 GB for wiki-18)
  SQfp16          exact search of float16 vectors; 2 bytes per number
  HNSW32          graph, nearly exact
  IVF16384,SQ8    inverted lists, nearly exact; 1 byte per number
  IVF16384,PQ96   inverted lists; 96 bytes per vector; loses some recall

A corpus line is {"id": "0", "contents": "\\"Title\\"\\ntext"}, as Search-R1 publishes it. If a
dense build is killed, run the same command again: it continues where it stopped.
"""

REMOVED = {
    "--force": "a build replaces no folder: delete it first",
    "--restart": "a build drops no unfinished one: delete OUT.partial first",
    "--search": "the server sets it",
    "--shard-rows": "a build is continued at any passage",
    "--workers": "one process encodes, with all cores or one GPU",
    "--devices": "one process encodes: --device names its GPU",
}


@dataclass(frozen=True)
class Build:
    """The index to build; the fields are the command's flags."""

    corpus: Path
    encoder: str
    out: Path
    factory: str | None = None
    revision: str | None = None
    max_length: int = 256
    encoder_dtype: str = "auto"
    prompts: str | None = None
    batch_size: int | None = None
    device: str | None = None
    skip_room_check: bool = False

    @property
    def partial(self) -> Path:
        """The folder of the unfinished index."""
        return self.out.with_name(f"{self.out.name}.partial")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = vars(_parser().parse_args(argv))
    with best_effort_output():
        return command.run(PROG, lambda: build(**args))


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
            if made is not None:
                job.partial.rename(out)
                _clean(out, keep=(*INDEX, manifest.NAME))
        finally:
            vectors = job.partial.glob(f"{VECTORS}*")
            if job.partial.is_dir() and not any(path.stat().st_size for path in vectors):
                shutil.rmtree(job.partial)
    if made is None:
        print(f"{out}: built already")
        return
    size = sum(made["files"].values())
    print(f"{out}: {made['corpus']['rows']:,} passages, {made['kind']}, {size:,} bytes")


def _check(job: Build) -> None:
    """Refuse bad arguments before anything is read."""
    if job.encoder == "bm25" and job.factory:
        raise ValueError("--encoder bm25: has no --factory, leave it out")
    if not job.corpus.is_file():
        raise ValueError(f"--corpus {job.corpus}: no such file")
    if job.out.exists() and not job.out.is_dir():
        raise ValueError(f"--out {job.out}: is a file, expected a folder")
    if job.out.resolve() in (Path("/"), Path.cwd()):
        raise ValueError(f"--out {job.out}: expected a folder to make, as indexes/NAME")
    above = next(folder for folder in job.out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"--out {job.out}: {above} is a file, expected a folder")
    is_other = job.partial.is_dir() and not (job.partial / LOCK).exists()
    if is_other and any(job.partial.iterdir()):
        raise ValueError(
            f"--out {job.out}: {job.partial}, where the build would write, is no unfinished build; "
            "move it away, or give another --out"
        )


def _build_partial(job: Build) -> dict[str, Any] | None:
    """Make the whole index in `job.partial`; its manifest, or None if `out` is that index."""
    _clean(job.partial, keep=(LOCK, *(path.name for path in job.partial.glob(f"{VECTORS}*"))))
    model = index = None
    if job.encoder != "bm25":
        # torch and transformers take seconds to import, and BM25 needs neither.
        from sg_rlhf.retrieval import dense_build
        from sg_rlhf.retrieval.encoder import Encoder

        # Before the corpus is read, which may take minutes.
        model = Encoder(
            job.encoder, job.revision, job.max_length, job.device, job.encoder_dtype, job.prompts
        )
        index = dense_build.new_index(job.factory or "Flat", model.dimension)
    offsets, sha256 = scan(job.corpus)
    rows = len(offsets) - 1
    request: dict[str, Any] = {
        "kind": "bm25" if model is None else job.factory or "Flat",
        "corpus": manifest.corpus_entry(job.corpus, job.out, rows, sha256),
        "encoder": _encoder_entry(job, model),
    }
    if _is_built(job.out, request):
        return None
    save_offsets(job.partial / manifest.OFFSETS, offsets)
    if model is None or index is None:
        # numba takes seconds to import, and dense indexes do not need it.
        from sg_rlhf.retrieval import bm25

        request |= bm25.build(job.corpus, job.partial / manifest.BM25)
        libraries = ["bm25s"]
    else:
        file = _vectors_file(job, request, model)
        done = dense_build.encoded_rows(file, model.dimension)
        if not job.skip_room_check:
            # The vectors, and an index of at most their size.
            disk = (2 * rows - done) * 4 * model.dimension
            resources.check_disk("--out", job.out, "the build", disk)
        if done:
            print(f"{job.partial}: continuing after {done:,} of {rows:,} passages", flush=True)
        corpus = Corpus(job.corpus, offsets)
        vectors = dense_build.encode(file, corpus, model, job.batch_size)
        dense_build.fill_index(index, request["kind"], vectors, job.partial / manifest.FAISS)
        libraries = ["faiss-cpu", "torch", "transformers"]
    request |= {
        **manifest.describe_files(job.partial, INDEX),
        "versions": {name: metadata.version(name) for name in libraries},
    }
    manifest.write(job.partial, request)
    return request


def _vectors_file(job: Build, request: Mapping[str, Any], model: Encoder) -> Path:
    """The file of the vectors of this build; its name depends on what is encoded, and how.

    Raises:
        ValueError: an unfinished build of something else is there.
    """
    made_of = [request["corpus"]["sha256"], _without_path(request["encoder"]), model.dtype]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    file = job.partial / f"{VECTORS}{digest[:16]}.f32"
    if any(path != file for path in job.partial.glob(f"{VECTORS}*")):
        raise ValueError(
            f"{job.partial}: an unfinished build of another corpus, or with another encoder; give "
            "the same arguments to continue it, or delete the folder"
        )
    return file


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


def _is_built(out: Path, request: dict[str, Any]) -> bool:
    """Whether `out` is the result of this request already; refuses to replace anything else."""
    if not out.exists() or not any(out.iterdir()):
        return False
    try:
        built = manifest.read(out)
    except ValueError as error:
        raise ValueError(f"--out {out}: not empty, and {error}; delete it first") from None
    if _identity(built) != _identity(request):
        raise ValueError(
            f"--out {out}: holds another index ({built['kind']} of {built['encoder']['model']}, "
            f"corpus SHA-256 {built['corpus']['sha256'][:16]}); delete it first"
        )
    return True


def _identity(request: dict[str, Any]) -> list[Any]:
    encoder = _without_path(request["encoder"])
    return [request["kind"].lower(), request["corpus"]["sha256"], encoder]


def _without_path(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """An encoder's entry without its location."""
    return {key: value for key, value in encoder.items() if key != "path"}


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keep a second build away from the same folder; a killed one leaves no lock behind."""
    with (partial / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another build is writing here") from None
        yield


def _clean(folder: Path, keep: Sequence[str]) -> None:
    """Remove everything else."""
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(PROG, "Build a search index of a corpus.", EPILOG)
    add = parser.add_argument
    add("--corpus", type=path, required=True, metavar="FILE",
        help="passages, one JSON object per line (required)")  # fmt: skip
    add("--encoder", type=printable_name, required=True, metavar="{bm25,MODEL}",
        help="bm25, or a text encoder: a Hugging Face id or a folder (required)")  # fmt: skip
    add("--factory", type=printable_name, metavar="STRING",
        help="kind of dense index, as a faiss index_factory string (default: Flat)")  # fmt: skip
    add("--out", type=path, required=True, metavar="DIR", help="folder for the index (required)")
    add("--revision", type=printable_name, metavar="R",
        help="commit, branch or tag of the encoder on the hub (default: the newest)")  # fmt: skip
    add("--max-length", type=positive_int, default=256, metavar="N",
        help="tokens per text; the encoder does not read the rest (default: 256)")  # fmt: skip
    add("--batch-size", type=positive_int, metavar="N",
        help="passages per forward pass (default: 64 on a CPU, 256 on a GPU)")  # fmt: skip
    add("--encoder-dtype", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="number type of the encoder (default: fp16 on a GPU, fp32 on a CPU)")  # fmt: skip
    add("--prompts", choices=("e5", "none"),
        help="prompts of an encoder whose files name none: e5 is `query: ` and `passage: ` "
        "(default: e5 for E5's ids on the hub and for models without sentence-transformers "
        "files)")  # fmt: skip
    add("--device", type=printable_name,
        help="cpu, or a GPU such as cuda:0 (default: a GPU if there is one)")  # fmt: skip
    add("--skip-room-check", action="store_true",
        help="build although the disk may be too small (default: refuse)")  # fmt: skip
    for flag, reason in REMOVED.items():
        add(flag, action=Removed, const=reason)
    return parser


if __name__ == "__main__":
    sys.exit(main())
