"""BM25's index of a corpus, in bounded memory, byte for byte what bm25s would make.

Texts are split shard by shard into a folder, where a killed build goes on after the last whole one:

    vocabulary    the words in the order in which they came, a line each
    words.i32     of each passage its different words, ascending, as lines of the vocabulary
    counts.i32    how often the passage has each
    passages.i32  two numbers a passage: how many words it has, and how many different ones
    shards.json   two numbers a shard: passages, and different words of all of them

Then each shard is scored and put where it belongs in the mapped files of the index (`fill`).
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sg_rlhf.common.atomic_io import disk_full_context, write_whole
from sg_rlhf.retrieval.analysis import Analysis
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.job import SHARDS

VOCABULARY, WORDS, COUNTS, PASSAGES = "vocabulary", "words.i32", "counts.i32", "passages.i32"
#: Words of a shard, about; and passages at most.
SHARD_WORDS, SHARD_ROWS = 2**20, 2**14
NUMBER = np.dtype("<i4")


class Split:
    """A corpus as words, in a folder; what is there of a killed build is used.

    Attributes:
        shards: passages, and different words of all of them, of each that is whole.
        vocabulary: the number of each word.
    """

    def __init__(self, folder: Path) -> None:
        """Take what is in the folder.

        Raises:
            ValueError: a file there is shorter than what was written.
        """
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[tuple[int, int]] = []
        words = 0
        if (whole := folder / SHARDS).exists():
            state = json.loads(whole.read_text(encoding="utf-8"))
            self.shards, words = [tuple(shard) for shard in state["shards"]], state["vocabulary"]
        pairs = sum(pairs for _, pairs in self.shards)
        sizes = {VOCABULARY: words, WORDS: 4 * pairs, COUNTS: 4 * pairs, PASSAGES: 8 * self.rows}
        for name, size in sizes.items():
            path = folder / name
            with path.open("ab") as file:
                if (found := file.tell()) < size:
                    raise ValueError(
                        f"{path}: {found:,} bytes, and {whole} says {size:,}; --restart drops it"
                    )
                file.truncate(size)
        lines = (folder / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]
        self.vocabulary = {word: number for number, word in enumerate(lines)}

    @property
    def rows(self) -> int:
        """The passages that are split."""
        return sum(rows for rows, _ in self.shards)

    def add(self, texts: Iterable[str], analysis: Analysis) -> Iterator[int]:
        """Split the passages that follow; gives the number of each shard's when it is on the disk.

        Raises:
            OSError: the disk is full.
        """
        texts = iter(texts)
        while True:
            known = len(self.vocabulary)
            lengths, words = self._words(texts, analysis)
            if not len(lengths):
                return
            size = len(self.vocabulary)
            fresh = list(islice(reversed(self.vocabulary), size - known))[::-1]
            rows = np.repeat(np.arange(len(lengths)), lengths)
            pairs, counts = np.unique(rows * size + words, return_counts=True)
            different = np.bincount(pairs // max(size, 1), minlength=len(lengths))
            passages = np.stack([lengths, different], axis=1)
            self._append(VOCABULARY, "".join(f"{word}\n" for word in fresh).encode())
            for name, numbers in ((WORDS, pairs % max(size, 1)), (COUNTS, counts)):
                self._append(name, numbers.astype(NUMBER).tobytes())
            self._append(PASSAGES, passages.astype(NUMBER).tobytes())
            self.shards.append((len(lengths), len(pairs)))
            state = {
                "shards": self.shards,
                "vocabulary": (self._folder / VOCABULARY).stat().st_size,
            }
            write_whole(self._folder / SHARDS, json.dumps(state), sync=True)
            yield len(lengths)

    def _words(self, texts: Iterator[str], analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
        """A shard's texts: how many words each has, and the numbers of them all."""
        lengths, found, vocabulary = array("i"), array("i"), self.vocabulary
        for text in islice(texts, SHARD_ROWS):
            words = analysis.words(text)
            lengths.append(len(words))
            found.extend([vocabulary.setdefault(word, len(vocabulary)) for word in words])
            if len(found) >= SHARD_WORDS:
                break
        return np.frombuffer(lengths, np.int32), np.frombuffer(found, np.int32)

    def _append(self, name: str, data: bytes) -> None:
        path = self._folder / name
        with disk_full_context(path), path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each shard: its passages [n, 2], and the words [p] and counts [p] of all of them."""
        row = pair = 0
        for rows, pairs in self.shards:
            passages = self._read(PASSAGES, 2 * row, 2 * rows).reshape(-1, 2)
            yield passages, self._read(WORDS, pair, pairs), self._read(COUNTS, pair, pairs)
            row, pair = row + rows, pair + pairs

    def _read(self, name: str, first: int, count: int) -> np.ndarray:
        return np.fromfile(self._folder / name, NUMBER, count, offset=NUMBER.itemsize * first)


def split(
    corpus: Path, rows: int, folder: Path, analysis: Analysis, *, progress: bool = True
) -> Split:
    """The words of a corpus of `rows` passages, in `folder`; goes on where a killed build was."""
    found = Split(folder)
    ready = found.rows
    if ready:
        print(f"{folder}: going on after {ready:,} of {rows:,} passages", flush=True)
    with tqdm(
        total=rows, initial=ready, desc="splitting words", unit="passage",
        disable=None if progress else True,
    ) as bar:  # fmt: skip
        for count in found.add(islice(iterate_contents(corpus), ready, None), analysis):
            bar.update(count)
    return found


def fill(found: Split, analysis: Analysis, files: dict[str, Path], *, progress: bool) -> None:
    """Write bm25s's matrix of scores, passages x words, column by column.

        score of a word in a passage = log(1 + (N - n + 0.5) / (n + 0.5)) f / (f + k1 (1 - b + b l))

    N passages, n that have the word, f times in this one, which is l times as long as their mean:
    bm25s's `lucene`, in the types that it computes with.

    Args:
        files: the paths of `data`, `indices` and `indptr`, as bm25s calls them.

    Raises:
        OSError: the disk is full.
    """
    holders = np.zeros(len(found.vocabulary), np.int64)
    total = 0
    for passages, words, _ in found.read():
        np.add.at(holders, words, 1)
        total += int(passages[:, 0].sum())
    mean = total / found.rows
    place = np.concatenate(([0], np.cumsum(holders)))
    few = place[-1] <= np.iinfo(np.int32).max
    with disk_full_context(files["indptr"]):
        np.save(files["indptr"], place.astype(np.int32 if few else np.int64))
    # Of few different numbers; numpy's logarithm may have another last bit than C's.
    numbers, which = np.unique(holders, return_inverse=True)
    rarity = np.array(
        [math.log(1 + (found.rows - n + 0.5) / (n + 0.5)) for n in numbers.tolist()], np.float32
    )[which]
    data = _mapped(files["data"], np.float32, int(place[-1]))
    indices = _mapped(files["indices"], np.int32, int(place[-1]))
    first = 0
    with tqdm(
        total=found.rows, desc="scoring", unit="passage", disable=None if progress else True
    ) as bar:
        for passages, words, counts in found.read():
            rows = np.repeat(np.arange(len(passages)), passages[:, 1])
            norm = analysis.k1 * ((1 - analysis.b) + analysis.b * passages[:, 0] / mean)
            scores = rarity[words] * (counts / (norm[rows] + counts))
            order = np.argsort(words, kind="stable")
            columns, starts, sizes = np.unique(words[order], return_index=True, return_counts=True)
            where = np.repeat(place[columns] - starts, sizes) + np.arange(len(words))
            data[where], indices[where] = scores[order], first + rows[order]
            place[columns] += sizes
            first += len(passages)
            bar.update(len(passages))
    for mapped in (data, indices):
        mapped.flush()


def _mapped(path: Path, dtype: type, count: int) -> Any:
    """A new array in a file, which has its room on the disk: a page without any ends a process."""
    with disk_full_context(path):
        made = np.lib.format.open_memmap(path, "w+", dtype, (count,))
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made
