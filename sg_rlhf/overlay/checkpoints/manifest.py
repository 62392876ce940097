"""The manifest of a checkpoint: size and SHA-256 of each file, verified before it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sg_rlhf.common.atomic_io import write_whole

NAME = "manifest.json"
#: Hashing threads of one rank; hashing releases the GIL, and a rank has a few large files.
_THREADS = 4
_RANK = re.compile(r"rank_?(\d+)")


class Entry(NamedTuple):
    """A file as it was written: size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


class InvalidManifest(ValueError):
    """The manifest cannot be read; the message does not name the folder."""


def names(folder: Path) -> list[str]:
    """All files of a folder except the manifest, relative to it, sorted."""
    files = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in files if name != NAME)


def assign_files(names: Iterable[str], ranks: int) -> list[list[str]]:
    """Distribute the files of a checkpoint over the ranks that hash them.

    A rank gets those that it wrote, by the rank in their names: they are in its page cache.
    """
    assigned: list[list[str]] = [[] for _ in range(ranks)]
    for index, name in enumerate(sorted(names)):
        match = _RANK.search(name)
        rank = int(match[1]) if match else index
        assigned[rank % ranks].append(name)
    return assigned


def hash_files(folder: Path, names: Iterable[str], sync: bool = False) -> dict[str, Entry]:
    """Sizes and hashes of files; OSError for one that cannot be read."""
    names = list(names)

    def entry(name: str) -> Entry:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Entry(file.tell(), digest)

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(entry, names), strict=True))


def render(entries: dict[str, Entry]) -> str:
    """The text of a manifest, one line per file."""
    rows = {name: entry._asdict() for name, entry in sorted(entries.items())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{"files": {{\n{lines}\n}}}}\n'


def write(folder: Path, entries: dict[str, Entry]) -> None:
    """Write a folder's manifest and sync it to disk."""
    write_whole(folder / NAME, render(entries), sync=True)


def read(folder: Path) -> dict[str, Entry] | None:
    """A folder's manifest, None if it has none; raises InvalidManifest."""
    try:
        content = json.loads((folder / NAME).read_bytes())
        return {
            str(name): Entry(int(row["size"]), str(row["sha256"]))
            for name, row in content["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else "its content is truncated or altered"
        )
        raise InvalidManifest(f"{NAME} cannot be read: {why}") from None


def first_mismatch(folder: Path, expected: dict[str, Entry], names: Collection[str]) -> str | None:
    """The first difference from the manifest, as a phrase, or None; compares all sizes first."""
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected[name].size:
            return f"{name} has {size} bytes and was written with {expected[name].size}"
    try:
        entries = hash_files(folder, names)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror}"
    altered = [name for name in names if entries[name] != expected[name]]
    return f"{altered[0]} was altered (its SHA-256 differs)" if altered else None
