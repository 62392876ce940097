"""Write a data set folder atomically: JSONL files and a manifest.

Used by `sg-rlhf data`. Files are written to a temporary folder next to the target and
moved at the end. The manifest records the request, so the same request need not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.common.text import format_bytes, notice_if_slow

MANIFEST = "manifest.json"
MADE_BY = "sg_rlhf.data"

Records = Iterable[Mapping[str, Any]]


class UsageError(ValueError):
    """Conflicting or invalid arguments; the message is one line."""


def current_manifest(out: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest if `out` has the complete, unchanged result of this request; else None."""
    manifest = _read_manifest(out)
    current = (
        manifest is not None
        and all(manifest.get(key) == value for key, value in request.items())
        and _is_intact(out, manifest)
    )
    return manifest if current else None


def check_writable(out: Path, force: bool) -> None:
    """Refuse a folder with files of other origin, or with our files after a change.

    Raises:
        UsageError: why, and that `--force` replaces the files.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out}: is a file, expected a folder")
    if force or not any(out.iterdir()):
        return
    manifest = _read_manifest(out)
    if manifest is None:
        raise UsageError(
            f"--out {out}: not empty and not made by this command, "
            "expected an empty or new folder (--force writes into it)"
        )
    if not _is_intact(out, manifest):
        raise UsageError(
            f"--out {out}: its files changed since they were made (--force replaces them)"
        )


def write_dataset(
    out: Path, files: Mapping[str, Records], request: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write JSONL files and their manifest atomically.

    Args:
        files: file name -> records, one JSON object per line.
        request: the arguments; `current_manifest` compares them.
        facts: results such as counts, for the manifest.

    Returns:
        The manifest: request, facts, and rows and SHA-256 of each file. It has no date and no
        absolute path, so the same request gives the same bytes.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_context(out),
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as outer,
    ):
        # Not the temporary folder itself: that one is readable by its owner only.
        new = Path(outer, "data")
        new.mkdir()
        written = {name: _write_jsonl(new / name, records) for name, records in files.items()}
        manifest = {"made_by": MADE_BY, **request, **facts, "files": written}
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (new / MANIFEST).write_text(text, encoding="utf-8")
        if not out.exists():
            new.rename(out)
            return manifest
        # An existing folder may hold other files (--force), so only ours are replaced. The manifest
        # is removed first and written last: without it the folder is not complete.
        (out / MANIFEST).unlink(missing_ok=True)
        for name in (*files, MANIFEST):
            os.replace(new / name, out / name)
    return manifest


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    size = format_bytes(path.stat().st_size)
    with notice_if_slow(f"hashing {path} ({size})"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_jsonl(path: Path, records: Records) -> dict[str, Any]:
    rows = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            rows += 1
    return {"rows": rows, "sha256": sha256_of(path)}


def _read_manifest(out: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and manifest.get("made_by") == MADE_BY
    return manifest if ours else None


def _is_intact(out: Path, manifest: Mapping[str, Any]) -> bool:
    files = manifest["files"]
    return all(
        (out / name).is_file() and sha256_of(out / name) == entry["sha256"]
        for name, entry in files.items()
    )
