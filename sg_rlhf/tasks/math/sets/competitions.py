"""Competitions as MathArena's repository held them: a file for each problem, and their answers."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.pinned_download import download_url
from sg_rlhf.data_io.records import DataError

#: Requests at a time.
_AT_A_TIME = 8


@dataclass(frozen=True)
class Competitions:
    """Folders of one commit, which become one file: a line `{"problem", "answer"}` for each.

    A folder holds `answers.csv` (id, answer) and `problems/ID.tex`. That commit is the last one
    before the repository moved its problems to the Hugging Face hub.
    """

    repository: str
    commit: str
    folders: tuple[str, ...]
    path: str
    sha256: str

    @property
    def url(self) -> str:
        """The first folder, for people."""
        return f"https://github.com/{self.repository}/tree/{self.commit}/{self.folders[0]}"

    def url_of(self, file: str) -> str:
        """Where a file of the repository can be downloaded."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{file}"

    def check(self, path: Path) -> None:
        """Compare a file with the one that the folders make; a `DataError` names both checksums."""
        actual = sha256_of(path)
        if actual != self.sha256:
            raise DataError(
                f"{path}: SHA-256 {actual}, expected {self.sha256}, the problems of {self.url}"
            )

    def download(self, folder: Path, name: str) -> Path:
        """Make the file in `folder`, which stays as it was on a `DataError`."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as parts:
            made = Path(parts, name)
            by_hand = f"save {name}, made where there is a network, in {folder}"
            rows = [
                row
                for number in range(len(self.folders))
                for row in self._rows(number, parts, by_hand)
            ]
            made.write_text("".join(rows), encoding="utf-8", newline="\n")
            self.check(made)
            os.replace(made, folder / name)
        return folder / name

    def _rows(self, number: int, parts: str, by_hand: str) -> Iterator[str]:
        source = self.folders[number]

        def get(file: str) -> str:
            target = Path(parts, str(number), file)
            download_url(self.url_of(f"{source}/{file}"), target, lambda path: None, by_hand)
            return target.read_text(encoding="utf-8")

        answers = list(csv.DictReader(get("answers.csv").splitlines()))
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            problems = pool.map(get, [f"problems/{row['id']}.tex" for row in answers])
            for row, problem in zip(answers, problems, strict=True):
                record = {"problem": problem.strip(), "answer": row["answer"].strip()}
                yield json.dumps(record, ensure_ascii=False) + "\n"
