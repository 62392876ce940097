"""The content of an index folder by SHA-256, in blocks: which bytes are not those that were built.

    "sha256": {
      "block_bytes": 67108864,
      "blocks": {"index.faiss": ["9f86d0...", ...], ...},     a hash a block, in order
      "ends":   {"index.faiss": "2c26b4..."}                  first and last MiB of a large file
    }

Blocks are hashed in parallel and a damaged one is named. A file of one block has the hash that
`sha256sum` prints. What a start can afford is `check_quickly`: the size of every file, small files
whole, the two ends of large ones. `check_wholly` reads every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sg_rlhf.common import resources

BLOCK = 64 * 2**20
#: A file up to this size is hashed at each start, which takes about 10 ms.
SMALL = 16 * 2**20
END = 2**20
_READ = 2**20


def describe(folder: Path, names: Iterable[str], *, progress: bool = False) -> dict[str, Any]:
    """The manifest's entries `files` (bytes of each) and `sha256`, for files inside `folder`."""
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    jobs = [(name, start) for name, size in sizes.items() for start in _starts(size, BLOCK)]
    found = _hash_all(folder, jobs, sizes, BLOCK, "hashing", progress)
    blocks: dict[str, list[str]] = {name: [] for name in sizes}
    for (name, _), value in zip(jobs, found, strict=True):
        blocks[name].append(value)
    ends = {name: _ends(folder / name) for name, size in sizes.items() if size > SMALL}
    return {"files": sizes, "sha256": {"block_bytes": BLOCK, "blocks": blocks, "ends": ends}}


def check_quickly(folder: Path, facts: dict[str, Any]) -> None:
    """Whether every file is there with its size, small ones and the ends of large ones unchanged.

    Args:
        facts: the manifest; one of before there were hashes has sizes alone.

    Raises:
        ValueError: naming the first file that is not as it was built.
    """
    for name, size in facts["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes"
            raise ValueError(f"{file}: {state}, but its index was built with {size} bytes")
    hashes = facts.get("sha256")
    if hashes is None:
        return
    for name, size in facts["files"].items():
        if size > SMALL:
            changed = _ends(folder / name) != hashes["ends"].get(name)
            where = "its first or last MiB is"
        else:
            with (folder / name).open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest()
            changed = [whole] != hashes["blocks"].get(name)
            where = "its content is"
        if changed:
            raise ValueError(
                f"{folder / name}: {where} not what was built (SHA-256); copy it again, or build "
                "the index again"
            )


def check_wholly(folder: Path, facts: dict[str, Any], *, progress: bool = False) -> None:
    """Whether every byte of every file is the one that was built; on all cores.

    Raises:
        ValueError: naming the first damaged block and how many there are.
    """
    check_quickly(folder, facts)
    hashes = facts.get("sha256")
    if hashes is None:
        raise ValueError(
            f"--verify: index {folder} was built before its content was hashed; "
            "build the index again"
        )
    block, sizes = hashes["block_bytes"], facts["files"]
    jobs = [(name, start) for name, size in sizes.items() for start in _starts(size, block)]
    found = _hash_all(folder, jobs, sizes, block, "verifying", progress)
    expected = [value for name in sizes for value in hashes["blocks"].get(name, ())]
    if len(expected) != len(jobs):
        raise ValueError(f"{folder}: {len(expected)} hashes for {len(jobs)} blocks in its manifest")
    damaged = [
        job for job, value, known in zip(jobs, found, expected, strict=True) if value != known
    ]
    if damaged:
        name, start = damaged[0]
        end = min(start + block, sizes[name])
        more = f", and {len(damaged) - 1} more of {len(jobs)} blocks" if len(damaged) > 1 else ""
        raise ValueError(
            f"{folder / name}: bytes {start} to {end} are not what was built (SHA-256){more}; "
            "copy it again, or build the index again"
        )


def _hash_all(
    folder: Path,
    jobs: list[tuple[str, int]],
    sizes: dict[str, int],
    block: int,
    what: str,
    progress: bool,
) -> list[str]:
    """The hash of each (file, start); hashlib lets go of the GIL, so threads use all cores."""
    with (
        tqdm(
            total=sum(sizes.values()), unit="B", unit_scale=True, desc=f"{what} {folder.name}",
            disable=None if progress else True,
        ) as bar,
        ThreadPoolExecutor(resources.cores()) as pool,
    ):  # fmt: skip
        jobs_done = pool.map(
            lambda job: _hash(folder / job[0], job[1], min(block, sizes[job[0]] - job[1]), bar),
            jobs,
        )
        return list(jobs_done)


def _hash(path: Path, start: int, length: int, bar: Any) -> str:
    digest = hashlib.sha256()
    _read(path, start, length, digest.update)
    bar.update(length)
    return digest.hexdigest()


def _ends(path: Path) -> str:
    digest = hashlib.sha256()
    _read(path, 0, END, digest.update)
    _read(path, max(0, path.stat().st_size - END), END, digest.update)
    return digest.hexdigest()


def _read(path: Path, start: int, length: int, take: Callable[[bytes], None]) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length > 0 and (part := file.read(min(length, _READ))):
            take(part)
            length -= len(part)


def _starts(size: int, block: int) -> range:
    return range(0, max(size, 1), block)
