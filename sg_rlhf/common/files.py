"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def resolved(path: Path, what: str) -> Path:
    """The path without links.

    Args:
        what: the option that gave it, for the message.

    Raises:
        ValueError: a link that leads to itself, or no path at all.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        raise ValueError(f"{what} {path}: no usable path (a link to itself?)".strip()) from None


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that it never holds half of its contents; a missing folder is made.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
