"""An index folder's manifest: which corpus and which encoder the index belongs to.

    manifest.json   the request, what came of it, the SHA-256 of the corpus and of every file here
    offsets.npy     where each passage starts in the corpus file
    index.faiss     dense;  bm25/  lexical

The corpus itself stays where it is; the manifest has its path relative to the folder. The hashes of
the files are described in `contents`; `manifest_sha256` is the manifest's own, without the paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.retrieval import contents

NAME = "manifest.json"
OFFSETS = "offsets.npy"
FAISS = "index.faiss"
BM25 = "bm25"
MADE_BY = "sg_rlhf.retrieval.index"
FORMAT = 1


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("expected the path of a file in the folder")
    return name


_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_File = Annotated[str, AfterValidator(_inside)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Corpus(_Part):
    path: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: _Hash
    mtime_ns: int


class _Encoder(_Part):
    model: str
    revision: str | None = None
    fingerprint: str | None = None


class _Hashes(_Part):
    block_bytes: int = Field(ge=1)
    blocks: dict[_File, list[_Hash]]
    ends: dict[_File, _Hash]


class _Manifest(_Part):
    """What every kind of index has; each adds entries of its own."""

    kind: str
    corpus: _Corpus
    encoder: _Encoder
    files: dict[_File, Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sha256: _Hashes | None = None
    manifest_sha256: _Hash | None = None


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest into `folder`; it comes last, so without one a folder is not complete.

    Args:
        manifest: with the entries of `contents.describe` among its own.
    """
    entry = {"made_by": MADE_BY, "format": FORMAT, **manifest}
    entry["manifest_sha256"] = _own_hash(entry)
    text = json.dumps(entry, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / NAME, text, sync=True)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an index folder, after the checks that each start can afford.

    Raises:
        ValueError: if `folder` holds no complete index that this version can read.
    """
    if not folder.is_dir():
        raise ValueError(f"--index {folder}: no such folder (make it: python -m {MADE_BY})")
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
        raise ValueError(
            f"{path}, {place}: {first['msg'].removeprefix('Value error, ')}; build the index again"
        ) from None
    if manifest.get("manifest_sha256", own := _own_hash(manifest)) != own:
        raise ValueError(
            f"{path}: not what was written with its index (SHA-256); copy it again, or build the "
            "index again"
        )
    contents.check_quickly(folder, manifest)
    if "sha256" not in manifest:
        print(
            f"{folder}: built before the content of an index was hashed, so damage of the same "
            "size is not noticed; the next build has hashes",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return manifest


def _own_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says; not of where corpus and encoder lie, which may change."""
    where = {"corpus": ("path", "mtime_ns"), "encoder": ("path",)}
    said = {
        key: {k: v for k, v in value.items() if k not in where[key]} if key in where else value
        for key, value in manifest.items()
        if key != "manifest_sha256"
    }
    text = json.dumps(said, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def verify(folder: Path, corpus: Path | None = None) -> dict[str, Any]:
    """`read`, and every byte of the index and of its corpus checked by SHA-256; a bar on stderr.

    Args:
        corpus: where the corpus is now, if not where it was.

    Raises:
        ValueError: naming the first damaged block, or the corpus.
    """
    facts = read(folder)
    contents.check_wholly(folder, facts, progress=True)
    check_corpus(folder, facts["corpus"], corpus, wholly=True)
    return facts


def files_of(folder: Path, parts: Iterable[str]) -> list[str]:
    """The files of an index, by their paths inside `folder`; `parts` are files or folders in it."""
    found = [path for part in parts for path in (folder / part, *(folder / part).rglob("*"))]
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]


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


def check_corpus(
    folder: Path, entry: dict[str, Any], corpus: Path | None = None, *, wholly: bool = False
) -> Path:
    """The corpus of an index: where it is now, after making sure that it is the same.

    Size and modification time as at build time are taken as proof; with another time (a copy) the
    whole file is hashed again, about a second a gigabyte; `wholly` does so in any case.

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
        if status.st_mtime_ns == entry["mtime_ns"] and not wholly:
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
