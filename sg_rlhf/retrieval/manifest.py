"""An index folder's manifest: which corpus and which encoder the index belongs to.

    manifest.json   the request, what came of it, and the corpus's SHA-256
    offsets.npy     where each passage starts in the corpus file
    index.faiss     dense;  bm25/  lexical

The corpus itself stays where it is; the manifest has its path relative to the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

NAME = "manifest.json"
OFFSETS = "offsets.npy"
FAISS = "index.faiss"
BM25 = "bm25"
MADE_BY = "sg_rlhf.retrieval.index"
FORMAT = 1


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest into `folder`; it comes last, so without one a folder is not complete."""
    entry = {"made_by": MADE_BY, "format": FORMAT, **manifest}
    text = json.dumps(entry, indent=2, ensure_ascii=False) + "\n"
    (folder / NAME).write_text(text, encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an index folder.

    Raises:
        ValueError: if `folder` holds no complete index that this version can read.
    """
    if not folder.is_dir():
        raise ValueError(f"--index {folder}: no such folder (make it: python -m {MADE_BY})")
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
        raise ValueError(f"--index {folder}: no {NAME} of {MADE_BY} in it, expected an index")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"--index {folder}: format {manifest['format']}, this version reads {FORMAT}; "
            "build the index again"
        )
    for name, size in manifest["files"].items():
        file = folder / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes"
            raise ValueError(f"{file}: {state}, but its index was built with {size} bytes")
    return manifest


def file_sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file in `folder`, by its path inside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def corpus_entry(corpus: Path, out: Path, rows: int, sha256: str) -> dict[str, Any]:
    """The manifest's part about the corpus."""
    status = corpus.stat()
    return {
        "path": os.path.relpath(corpus.resolve(), out.resolve()),
        "rows": rows,
        "bytes": status.st_size,
        "sha256": sha256,
        "mtime_ns": status.st_mtime_ns,
    }


def check_corpus(folder: Path, entry: dict[str, Any], corpus: Path | None = None) -> Path:
    """The corpus of an index: where it is now, after making sure that it is the same.

    Size and modification time as at build time are taken as proof; with another time (a copy) the
    whole file is hashed again, about a second a gigabyte.

    Raises:
        ValueError: if it is another corpus, naming index and corpus.
    """
    path = corpus or Path(os.path.normpath(folder.resolve() / entry["path"]))
    if not path.is_file():
        raise ValueError(
            f"--index {folder}: its corpus {path} is not there (--corpus FILE says where it is)"
        )
    status = path.stat()
    if status.st_size == entry["bytes"]:
        if status.st_mtime_ns == entry["mtime_ns"]:
            return path
        print(f"checking the SHA-256 of {path} ...", file=sys.stderr, flush=True)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        found = f"other, {status.st_size} instead of {entry['bytes']} bytes"
    if found != entry["sha256"]:
        raise ValueError(
            f"corpus {path} (SHA-256 {found[:40]}) is not the one that index {folder} was built "
            f"from (SHA-256 {entry['sha256'][:40]}); build the index again, or pass --corpus"
        )
    return path


def check_encoder(folder: Path, expected: dict[str, Any], found: dict[str, str]) -> None:
    """Refuse an encoder other than the one that the index was built with, naming both.

    Args:
        expected: the manifest's entry.
        found: the `model` and its `revision` or `fingerprint`.
    """
    mark = "fingerprint" if "fingerprint" in expected else "revision"
    # A folder may have been renamed; a model id may not have changed.
    same_name = mark == "fingerprint" or expected["model"] == found["model"]
    if same_name and expected[mark] == found.get(mark):
        return
    raise ValueError(
        f"encoder {_describe(found)} is not the one that index {folder} was built with, "
        f"{_describe(expected)}; pass that one with --encoder, or build the index again"
    )


def _describe(identity: dict[str, Any]) -> str:
    marks = [key for key in ("revision", "fingerprint") if key in identity]
    return " ".join([identity["model"], *(f"({key} {identity[key][:24]})" for key in marks)])
