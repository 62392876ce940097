"""The manifest of an index folder: the corpus and the encoder that the index belongs to.

    manifest.json   the request, its result, the SHA-256 of the corpus and of every file here
    offsets.npy     where each passage starts in the corpus file
    index.faiss     dense;  bm25/  lexical

The corpus itself stays where it is; the manifest has its path relative to the folder. Each start
checks the size of every file and the SHA-256 of small ones; `verify` reads every byte.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io.dataset_writer import sha256_of

NAME = "manifest.json"
OFFSETS = "offsets.npy"
FAISS = "index.faiss"
BM25 = "bm25"
MADE_BY = "sg_rlhf.retrieval.index"
FORMAT = 1
#: Bytes of a file that is hashed at each start, which takes about 10 ms.
SMALL = 16 * 2**20


class _Corpus(BaseModel):
    path: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str
    mtime_ns: int


class _Encoder(BaseModel):
    model: str
    revision: str | None = None
    fingerprint: str | None = None
    max_length: int = 0
    prompts: dict[str, str] | None = None


class _Manifest(BaseModel):
    """The entries of every kind of index; each kind adds its own."""

    kind: str
    corpus: _Corpus
    encoder: _Encoder
    files: dict[str, int] = Field(min_length=1)
    sha256: dict[str, str]


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest atomically; it comes last, so a folder without one is incomplete."""
    entry = {"made_by": MADE_BY, "format": FORMAT, **manifest}
    write_whole(folder / NAME, json.dumps(entry, indent=2, ensure_ascii=False) + "\n", sync=True)


def describe_files(folder: Path) -> dict[str, Any]:
    """The entries `files` (bytes of each) and `sha256`, of the files of an index."""
    paths = [folder / FAISS, folder / OFFSETS, *folder.glob(f"{BM25}/**/*")]
    files = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    return {
        "files": {name: path.stat().st_size for name, path in files.items()},
        "sha256": {name: sha256_of(path) for name, path in files.items()},
    }


def read(folder: Path, *, every_byte: bool = False) -> dict[str, Any]:
    """The manifest of an index folder; ValueError if it or a file is not as it was built."""
    if not folder.is_dir():
        raise ValueError(f"--index {folder}: no such folder (make it: sg-rlhf index)")
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
        raise ValueError(f"--index {folder}: no {NAME} of {MADE_BY} in it, expected an index")
    if manifest.get("format") != FORMAT:
        found = repr(manifest["format"])[:60] if "format" in manifest else "missing"
        raise ValueError(
            f"{path}, format: {found}, this version reads {FORMAT}; build the index again"
        )
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}, {place}: {first['msg']}; build the index again") from None
    for name, size in manifest["files"].items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes"
            raise ValueError(f"{file}: {state}, but its index was built with {size} bytes")
        is_read = every_byte or size <= SMALL
        if is_read and sha256_of(file) != manifest["sha256"].get(name):
            raise ValueError(
                f"{file}: its content is not what was built (SHA-256); copy it again, or build "
                "the index again"
            )
    return manifest


def corpus_entry(corpus: Path, out: Path, rows: int, sha256: str) -> dict[str, Any]:
    status = corpus.stat()
    return {
        "path": os.path.relpath(corpus.resolve(), out.resolve()),
        "rows": rows,
        "bytes": status.st_size,
        "sha256": sha256,
        "mtime_ns": status.st_mtime_ns,
    }


def check_corpus(
    folder: Path, entry: dict[str, Any], corpus: Path | None = None, *, every_byte: bool = False
) -> Path:
    """The path of an index's corpus; ValueError if it is another corpus.

    Size and modification time as at build time are taken as proof; with another time (a copy) the
    whole file is hashed again, about a second per gigabyte.
    """
    path = corpus or Path(os.path.normpath(folder.resolve() / entry["path"]))
    if not path.is_file():
        raise ValueError(
            f"--index {folder}: its corpus {path} is not there (--corpus FILE says where it is)"
        )
    status = path.stat()
    is_same = status.st_size == entry["bytes"]
    if is_same and (every_byte or status.st_mtime_ns != entry["mtime_ns"]):
        print(f"checking the SHA-256 of {path} ...", file=sys.stderr, flush=True)
        is_same = sha256_of(path) == entry["sha256"]
    if not is_same:
        raise ValueError(
            f"corpus {path} is not the one that index {folder} was built from (SHA-256 "
            f"{entry['sha256'][:40]}); build the index again, or pass --corpus"
        )
    return path
