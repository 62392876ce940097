"""Writing a file whole or not at all, and saying so in one line where the disk is full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

#: No room, and none left for this user.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Nobody reads any more: the other end of a pipe has ended, a terminal is gone.
_UNREAD = (errno.EPIPE, errno.EIO)
#: What libraries that are not written in Python make of the same.
#: The last is numpy's, which gives no number of the error.
_FULL_TEXTS = re.compile(
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
)
#: Written to see whether there is room at all.
_PROBE_BYTES = 2**20


def real_path(path: Path, what: str) -> Path:
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


def write_whole(path: Path, data: str | bytes, sync: bool = False) -> None:
    """Write a file so that it never holds half of its contents; a missing folder is made.

    Args:
        sync: return when it is on the disk under its name, where a power failure leaves it.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_full_context(path):
            with temporary.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if sync:
                sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def append_whole(path: Path, text: str) -> None:
    """Append lines to a file and bring them to the disk, all of them or nothing.

    A last line that a kill cut short is ended first, so that it damages no other.

    Raises:
        OSError: they cannot be written; the file is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered, as a buffer would keep what the disk did not take and write it when it is closed.
    with disk_full_context(path), path.open("ab+", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if before and os.pread(file.fileno(), 1, before - 1) != b"\n":
            text = "\n" + text
        data = memoryview(text.encode())
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk; nothing on file systems that cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_full_context(path: Path) -> Iterator[None]:
    """Whatever finds the disk full in here raises an ``OSError`` that names ``path``.

    Of a file that it is writing Python says no name, and torch ("unexpected pos 704 vs 598") not
    even that: so a ``RuntimeError`` counts too, where nothing can be written.
    """
    try:
        yield
    except Exception as error:
        torchs = isinstance(error, RuntimeError) and not _has_room(path.parent)
        if not (torchs or is_full_disk(error)):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None


class BestEffortStream(io.RawIOBase):
    """A file descriptor for lines: what a full disk does not take, or nobody reads, is lost.

    They come from everywhere, libraries' too, and none of them may be what ends a run.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def over(cls, descriptor: int) -> TextIO:
        """A text file of it, line by line; closing it leaves the descriptor open."""
        return io.TextIOWrapper(io.BufferedWriter(cls(descriptor)), line_buffering=True)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if not (is_full_disk(error) or error.errno in _UNREAD):
                raise
            return len(data)


@contextlib.contextmanager
def best_effort_output() -> Iterator[None]:
    """What this process prints in here goes through :class:`Lossy`.

    A run takes days: that what reads its lines has ended (``| tee`` in a window that was closed)
    must neither end it nor change its status.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    with (
        contextlib.redirect_stdout(_lossily(sys.stdout)),
        contextlib.redirect_stderr(_lossily(sys.stderr)),
    ):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _lossily(stream: TextIO) -> TextIO:
    """The stream through :class:`Lossy`; as it is where it is no file of the system's."""
    try:
        return BestEffortStream.over(stream.fileno())
    except (OSError, ValueError):
        return stream


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that a disk is full, or a user's share of it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return _FULL_TEXTS.search(str(error)) is not None


def _has_room(folder: Path) -> bool:
    probe = folder / f".probe.{os.getpid()}.tmp"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in _FULL
    finally:
        probe.unlink(missing_ok=True)
    return True
