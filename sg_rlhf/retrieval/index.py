"""Build a retrieval index: `sg-rlhf index --corpus FILE --encoder E --out DIR`.

Everything is written to `DIR.partial` and renamed at the end. A killed dense build continues.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import path, positive_int, printable_name
from sg_rlhf.common.atomic_io import best_effort_output, disk_full_context
from sg_rlhf.retrieval import command, manifest
from sg_rlhf.retrieval.corpus import Corpus, scan

#: In the folder of an unfinished build: the identity of the build, and its vectors.
BUILD, VECTORS = "build.json", "vectors.f32"
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = vars(_parser().parse_args(argv))
    with best_effort_output():
        return command.run(PROG, lambda: build(**args))


def build(
    corpus: Path,
    encoder: str,
    out: Path,
    *,
    factory: str | None = None,
    revision: str | None = None,
    max_length: int = 256,
    encoder_dtype: str = "auto",
    prompts: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    skip_room_check: bool = False,
) -> None:
    """Build an index; the arguments are the command's flags. ValueError leaves `out` as it was."""
    if encoder == "bm25" and factory:
        raise ValueError("--encoder bm25: has no --factory, leave it out")
    if not corpus.is_file():
        raise ValueError(f"--corpus {corpus}: no such file")
    if not out.name:
        raise ValueError(f"--out {out}: expected a folder to make, such as indexes/NAME")
    there = resources.nearest_existing(out)
    if not there.is_dir():
        raise ValueError(f"--out {out}: {there} is a file, expected a folder")
    model = index = None
    # Each takes seconds to import (torch, numba), and a build needs one of them.
    if encoder == "bm25":
        from sg_rlhf.retrieval import bm25

        kind, identity = "bm25", bm25.IDENTITY
    else:
        from sg_rlhf.retrieval import dense_build
        from sg_rlhf.retrieval.encoder import Encoder

        # Before the corpus is read, which may take minutes.
        model = Encoder(encoder, revision, max_length, device, encoder_dtype, prompts)
        kind, identity = factory or "Flat", model.identity
        index = dense_build.new_index(kind, model.dimension)
        if Path(encoder).is_dir():
            path = os.path.relpath(Path(encoder).resolve(), out.resolve())
            identity = {**identity, "path": path}
    offsets, sha256 = scan(corpus)
    facts: dict[str, Any] = {
        "kind": kind,
        "corpus": manifest.corpus_entry(corpus, out, len(offsets) - 1, sha256),
        "encoder": identity,
    }
    if _is_built(out, facts):
        print(f"{out}: built already")
        return
    made_of = [*_identity(facts)[1:], model and model.dtype]
    with _unfinished(out, made_of) as partial:
        with disk_full_context(partial / manifest.OFFSETS):
            np.save(partial / manifest.OFFSETS, offsets)
        if model is None:
            bm25.build(corpus, partial / manifest.BM25)
        else:
            file, rows = partial / VECTORS, len(offsets) - 1
            done = dense_build.encoded_rows(file, model.dimension)
            if not skip_room_check:
                # The vectors, and an index of at most their size.
                disk = (2 * rows - done) * 4 * model.dimension
                resources.check_disk("--out", out, "the build", disk)
            if done:
                print(f"{partial}: continuing after {done:,} of {rows:,} passages", flush=True)
            vectors = dense_build.encode(file, Corpus(corpus, offsets), model, batch_size)
            dense_build.fill_index(index, kind, vectors, partial / manifest.FAISS)
        facts |= manifest.describe_files(partial)
        manifest.write(partial, facts)
        partial.rename(out)
        (out / VECTORS).unlink(missing_ok=True)
        (out / BUILD).unlink()
    size = sum(facts["files"].values())
    print(f"{out}: {facts['corpus']['rows']:,} passages, {kind}, {size:,} bytes")


@contextmanager
def _unfinished(out: Path, made_of: list[Any]) -> Iterator[Path]:
    """The folder of this build while it is unfinished; ValueError if it holds something else.

    It is locked, and goes with a build that fails before a passage is encoded.
    """
    partial = out.with_name(f"{out.name}.partial")
    file, vectors = partial / BUILD, partial / VECTORS
    if partial.is_dir() and any(partial.iterdir()) and not file.exists():
        raise ValueError(
            f"--out {out}: {partial}, where the build would write, is no unfinished build; "
            "move it away, or give another --out"
        )
    partial.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another build is writing here") from None
        lock.seek(0)
        found = lock.read()
        if found not in ("", json.dumps(made_of)):
            raise ValueError(
                f"{partial}: an unfinished build of another corpus, or with another encoder; give "
                "the same arguments to continue it, or delete the folder"
            )
        try:
            if not found:
                lock.write(json.dumps(made_of))
                lock.flush()
            yield partial
        except BaseException:
            if not vectors.exists() or not vectors.stat().st_size:
                shutil.rmtree(partial)
            raise


def _is_built(out: Path, facts: dict[str, Any]) -> bool:
    """Whether `out` is the result of this request already; refuses to replace anything else."""
    if not out.exists() or not any(out.iterdir()):
        return False
    try:
        built = manifest.read(out)
    except ValueError as error:
        raise ValueError(f"--out {out}: not empty, and {error}; delete it first") from None
    if _identity(built) != _identity(facts):
        raise ValueError(
            f"--out {out}: holds another index ({built['kind']} of {built['encoder']['model']}, "
            f"corpus SHA-256 {built['corpus']['sha256'][:16]}); delete it first"
        )
    return True


def _identity(facts: Mapping[str, Any]) -> list[Any]:
    encoder = {key: value for key, value in facts["encoder"].items() if key != "path"}
    return [facts["kind"].lower(), facts["corpus"]["sha256"], encoder]


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
    return parser


if __name__ == "__main__":
    sys.exit(main())
