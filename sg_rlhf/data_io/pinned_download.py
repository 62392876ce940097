"""Download published files: pinned to a commit, verified, and written atomically."""

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
    """A file in a public repository at one commit, with its checksum where one is known.

    Attributes:
        sha256: of the file; "" if only its git id is known.
        git_blob: git's id of the content (a SHA-1), from the commit's tree; "" if it is not known.
        on_hub: a data set of the Hugging Face hub (``HF_ENDPOINT``), not a GitHub repository.
    """

    repository: str
    commit: str
    path: str
    sha256: str = ""
    git_blob: str = ""
    on_hub: bool = False

    @property
    def url(self) -> str:
        """The download address."""
        if self.on_hub:
            hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
            return f"{hub}/datasets/{self.repository}/resolve/{self.commit}/{self.path}"
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    def check(self, path: Path) -> None:
        """Verify a file's checksum; where none is known, nothing.

        Raises:
            DataError: the checksum differs; the message has both.
        """
        if self.sha256:
            kind, expected, actual = "SHA-256", self.sha256, sha256_of(path)
        elif self.git_blob:
            kind, expected, actual = "git blob id", self.git_blob, git_blob_of(path)
        else:
            return
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
    """Download a pinned file to `folder / name` and verify it; `by_hand` as in `download_url`.

    Raises:
        DataError: no connection, or the checksum differs. `folder` is unchanged.
    """
    return download_url(origin.url, folder / name, origin.check, by_hand)


def download_url(
    url: str, path: Path, check: Callable[[Path], None], by_hand: str | None = None
) -> Path:
    """Download `url` to `path`. The file appears only after `check` accepted it.

    Args:
        check: raises `DataError` for a wrong file.
        by_hand: what the error tells a user who gets the file by hand; default: save it as `path`.

    Raises:
        DataError: no connection, an HTTP error, or an error of `check`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder, path.name)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, part.open("wb") as file:
                size = answer.headers.get("Content-Length")
                # disable=None: no bar if stderr is not a terminal.
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
