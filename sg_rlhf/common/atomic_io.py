"""Atomic writes and appends, and one-line errors for a full disk."""

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

#: The disk is full, or this user's quota is used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: The reader of a pipe has ended, or the terminal was closed.
_UNREAD = (errno.EPIPE, errno.EIO)
#: Messages of libraries for a full disk. The last one is numpy's, which has no errno.
_FULL_TEXTS = re.compile(
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
)
#: Bytes of the test file that shows whether the disk is full.
_PROBE_BYTES = 2**20


def real_path(path: Path, what: str) -> Path:
    """Resolve links; ValueError, naming the option `what`, for a circular one."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        raise ValueError(f"{what} {path}: no usable path (a link to itself?)".strip()) from None


def write_whole(path: Path, data: str | bytes, sync: bool = False) -> None:
    """Write a file atomically; create its folder if needed.

    Args:
        sync: return only when the file and its name are on the disk (fsync).

    Raises:
        OSError: it cannot be written. The old file is unchanged.
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


def append_whole(path: Path, text: str, sync: bool = True) -> None:
    """Append lines to a file: all of them or none.

    If an earlier kill cut off the last line, that line is ended first.

    Args:
        sync: return only when they are on the disk (fsync), which takes milliseconds.

    Raises:
        OSError: they cannot be written. The file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: a buffer would keep what a full disk refused and write it on close.
    with disk_full_context(path), path.open("ab+", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if before and os.pread(file.fileno(), 1, before - 1) != b"\n":
            text = "\n" + text
        data = memoryview(text.encode())
        try:
            while data:
                data = data[file.write(data) :]
            if sync:
                os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise


def sync_folder(folder: Path) -> None:
    """Fsync a folder's list of names; does nothing where the file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_full_context(path: Path) -> Iterator[None]:
    """Turn errors of a full disk into an ``OSError`` that names ``path``.

    Python's error has no file name. torch raises a ``RuntimeError`` that does not mention the disk
    ("unexpected pos 704 vs 598"), so this counts too if nothing can be written.
    """
    try:
        yield
    except Exception as error:
        from_torch = isinstance(error, RuntimeError) and not _can_write(path.parent)
        if not (from_torch or is_full_disk(error)):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None


class BestEffortStream(io.RawIOBase):
    """Output that drops lines when the disk is full or the reader has gone, instead of failing.

    Our own lines and those of libraries pass through it. None of them may end a run.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def over(cls, descriptor: int) -> TextIO:
        """A line-buffered text stream; closing it leaves the descriptor open."""
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
    """Send this process's stdout and stderr through :class:`BestEffortStream`.

    A run takes days. When the reader of its output ends (``| tee`` in a closed window), the run
    must go on and keep its exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    with (
        contextlib.redirect_stdout(_best_effort(sys.stdout)),
        contextlib.redirect_stderr(_best_effort(sys.stderr)),
    ):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _best_effort(stream: TextIO) -> TextIO:
    """The stream through :class:`BestEffortStream`; unchanged if it has no file descriptor."""
    try:
        return BestEffortStream.over(stream.fileno())
    except (OSError, ValueError):
        return stream


def is_full_disk(error: BaseException) -> bool:
    """Whether an error means that the disk or the user's quota is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return _FULL_TEXTS.search(str(error)) is not None


def _can_write(folder: Path) -> bool:
    """Whether a file of 1 MiB can be written."""
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
