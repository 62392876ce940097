"""What is in a checkpoint, by sizes and SHA-256: written into it, and asked before it is loaded."""

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
#: Of one rank at a time; hashing frees Python's lock, and a rank has a few large files.
_THREADS = 4
_RANK = re.compile(r"rank_?(\d+)")


class Entry(NamedTuple):
    """A file as it was written: bytes and SHA-256 (hexadecimal)."""

    size: int
    sha256: str


class InvalidManifest(ValueError):
    """The manifest is not one; the message says what it is, without the folder's name."""


def names(folder: Path) -> list[str]:
    """All files of a folder but the manifest, relative to it, sorted."""
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if name != NAME)


def assign_files(names: Iterable[str], ranks: int) -> list[list[str]]:
    """Who reads which file: each rank what it wrote by its name, the rest in turns.

    DeepSpeed names files ``zero_pp_rank_3_mp_rank_00_optim_states.pt``; a rank's own file is in its
    machine's memory still. Any assignment would be right.
    """
    dealt: list[list[str]] = [[] for _ in range(ranks)]
    for place, name in enumerate(sorted(names)):
        found = _RANK.search(name)
        rank = int(found[1]) if found else place
        dealt[rank % ranks].append(name)
    return dealt


def hash_files(folder: Path, names: Iterable[str], sync: bool = False) -> dict[str, Entry]:
    """Sizes and hashes of files in ``folder``.

    Args:
        sync: bring each to the disk first.

    Raises:
        OSError: one cannot be read.
    """
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
    """A manifest, a line a file."""
    rows = {name: entry._asdict() for name, entry in sorted(entries.items())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{"files": {{\n{lines}\n}}}}\n'


def write(folder: Path, entries: dict[str, Entry]) -> None:
    """Write a folder's manifest and bring it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / NAME, render(entries), sync=True)


def read(folder: Path) -> dict[str, Entry] | None:
    """A folder's manifest; None if it has none.

    Raises:
        Unreadable: it is there and is no manifest.
    """
    try:
        found = json.loads((folder / NAME).read_bytes())
        return {
            str(name): Entry(int(row["size"]), str(row["sha256"]))
            for name, row in found["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its text is cut short or altered"
        raise InvalidManifest(f"{NAME} cannot be read: {why}") from None


def first_mismatch(folder: Path, expected: dict[str, Entry], of: Collection[str]) -> str | None:
    """What is wrong with the files ``of`` a folder, the first of them; None if they are whole.

    Sizes of all are compared before anything is read.
    """
    for name in of:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected[name].size:
            return f"{name} has {size} bytes and was written with {expected[name].size}"
    try:
        found = hash_files(folder, of)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror}"
    altered = [name for name in of if found[name] != expected[name]]
    return f"{altered[0]} is not what was written (another SHA-256)" if altered else None
