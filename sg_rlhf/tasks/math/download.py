"""Downloads of the published files: pinned to a commit, checked, and never half there."""

from __future__ import annotations

import os
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from sg_rlhf.common.rows import DataError
from sg_rlhf.tasks.math.data import EvalSet, Origin, find_eval_file

TIMEOUT_S = 60.0


def download(origin: Origin, folder: Path, name: str) -> Path:
    """Get a pinned file into `folder` under `name`, checked against its checksum.

    Raises:
        DataError: no connection, or another file came; `folder` stays as it was.
    """
    return download_url(origin.url, folder / name, origin.check)


def download_url(url: str, path: Path, check: Callable[[Path], None]) -> Path:
    """Get `url` into `path`, which appears only when `check` accepts the whole file.

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
                f"{url}: cannot download: {error}; get the file by hand and give its path instead"
            ) from None
        check(part)
        os.replace(part, path)
    return path


def download_eval_set(eval_set: EvalSet, data_dir: Path) -> Path:
    """The set's file in `data_dir`, downloaded if it is not there yet.

    Raises:
        DataError: see `download`.
    """
    try:
        return find_eval_file(eval_set, data_dir)
    except DataError:
        return download(eval_set.origin, data_dir, eval_set.file)
