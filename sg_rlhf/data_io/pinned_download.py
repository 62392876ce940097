"""Published files: pinned to a commit, checked, and never half there."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.records import DataError

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Origin:
    """A file in a public GitHub repository at one commit, and what proves that it is that file.

    Attributes:
        sha256: of the file; "" where only its git id is known.
        git_blob: git's id of the file's content (a SHA-1), from the commit's tree.
    """

    repository: str
    commit: str
    path: str
    sha256: str = ""
    git_blob: str = ""

    @property
    def url(self) -> str:
        """Where the file can be downloaded."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    def check(self, path: Path) -> None:
        """Compare a file with this one.

        Raises:
            DataError: it is another file; both checksums are named.
        """
        if self.sha256:
            kind, expected, actual = "SHA-256", self.sha256, sha256_of(path)
        else:
            kind, expected, actual = "git blob id", self.git_blob, git_blob_of(path)
        if actual != expected:
            raise DataError(f"{path}: {kind} {actual}, expected {expected}, the file of {self.url}")


def git_blob_of(path: Path) -> str:
    """Git's id of a file's content, in hex (what `git hash-object` prints)."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def download(origin: Origin, folder: Path, name: str, by_hand: str | None = None) -> Path:
    """Get a pinned file into `folder` under `name`, checked against its checksum.

    Args:
        by_hand: as `download_url`'s.

    Raises:
        DataError: no connection, or another file came; `folder` stays as it was.
    """
    return download_url(origin.url, folder / name, origin.check, by_hand)


def download_url(
    url: str, path: Path, check: Callable[[Path], None], by_hand: str | None = None
) -> Path:
    """Get `url` into `path`, which appears only when `check` accepts the whole file.

    Args:
        by_hand: what to do with a file that the user got by hand; None: save it as `path`.

    Raises:
        DataError: no connection, an HTTP error, or what `check` raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder, path.name)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, part.open("wb") as file:
                size = answer.headers.get("Content-Length")
                # None: no bar where stderr is not a terminal.
                with tqdm(
                    desc=path.name,
                    total=int(size) if size else None,
                    unit="B",
                    unit_scale=True,
                    disable=None,
                    leave=False,
                ) as bar:
                    while chunk := answer.read(1 << 18):
                        file.write(chunk)
                        bar.update(len(chunk))
        except (OSError, HTTPException) as error:
            raise DataError(
                f"{url}: cannot download: {error}; get the file by hand and "
                f"{by_hand or f'save it as {path}'}"
            ) from None
        check(part)
        os.replace(part, path)
    return path
