"""BM25's files: byte for byte those of bm25s, in shards, and after a kill wherever it comes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bm25s  # type: ignore[import-untyped]
import numpy as np
import pytest

from sg_rlhf.retrieval import index, lexical, postings, unfinished
from sg_rlhf.retrieval.analysis import ANALYSES, LUCENE, WORDS, Analysis
from tests.unit.retrieval.conftest import ROWS, write_corpus


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "SHARD_WORDS", 2500)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of_bm25s(texts: list[str], analysis: Analysis, out: Path) -> dict[str, bytes]:
    """What bm25s makes of the same words, all of them in memory."""
    vocabulary: dict[str, int] = {}
    words = [analysis.words(text) for text in texts]
    ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in some] for some in words]
    model = bm25s.BM25(k1=analysis.k1, b=analysis.b, method="lucene", csc_backend="scipy")
    model.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    model.save(out, show_progress=False)
    return files(out)


@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
@pytest.mark.parametrize("rows", [250, 2**14])
def test_the_files_are_those_of_bm25s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], analysis: Analysis, rows: int
) -> None:
    monkeypatch.setattr(postings, "SHARD_ROWS", rows)
    # Passages without words at the start, the end and between, a whole shard of them as well.
    made = ["", *texts[:300], *["... the"] * 600, *texts[300:], "the"]
    corpus = write_corpus(tmp_path / "corpus.jsonl", made)
    lexical.build(corpus, len(made), tmp_path / "ours", analysis, progress=False)
    assert files(tmp_path / "ours") == of_bm25s(made, analysis, tmp_path / "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "ours", "theirs"]


class Killed(BaseException):
    """What no handler of an error catches."""


def dying(count: int, calls: Callable[..., object]) -> Callable[..., object]:
    """`calls`, which dies after `count` of them."""
    left = [count]

    def mortal(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return calls(*arguments, **options)

    return mortal


def test_killed_and_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After whatever file of a shard was written, and while the shards become an index."""
    lexical.build(corpus, ROWS, tmp_path / "undisturbed", LUCENE, progress=False)
    parts, out = tmp_path / "parts", tmp_path / "killed"

    def shards() -> list[tuple[int, int]]:
        state = parts / "shards.json"
        return json.loads(state.read_text())["shards"] if state.exists() else []

    def killed(place: Any, name: str, count: int) -> None:
        rows = sum(rows for rows, _ in shards())
        with monkeypatch.context() as patch:
            patch.setattr(place, name, dying(count, getattr(place, name)))
            with pytest.raises(Killed):
                lexical.build(corpus, ROWS, out, LUCENE, parts, progress=False)
        said = f"going on after {rows} of {ROWS} passages"
        assert (said in capsys.readouterr().out) == bool(rows)

    for count, whole in ((0, 0), (1, 0), (2, 0), (3, 0), (5, 1), (6, 2), (11, 4)):
        killed(postings.Split, "_append", count)
        assert len(shards()) == whole
    # And what a machine that loses its power may leave behind the last whole shard.
    for name in (postings.WORDS, postings.VOCABULARY):
        with (parts / name).open("ab") as file:
            file.write(os.urandom(77))
    killed(postings, "fill", 0)
    lexical.build(corpus, ROWS, out, LUCENE, parts, progress=False)
    assert files(out) == files(tmp_path / "undisturbed")


def run(corpus: Path, out: Path, *more: str) -> int:
    """The index command."""
    return index.main(["--corpus", str(corpus), "--encoder", "bm25", "--out", str(out), *more])


def killed_before_scores(corpus: Path, out: Path, *more: str) -> None:
    """The same, killed when all words are split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postings, "fill", dying(0, postings.fill))
        with pytest.raises(Killed):
            run(corpus, out, *more)


def test_words_of_another_analysis_or_corpus_are_not_gone_on_with(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index"
    killed_before_scores(corpus, out, "--analysis", "words")
    assert run(corpus, out) == 2
    error = capsys.readouterr().err
    assert f"unfinished build with encoder {WORDS.identity}" in error and "--restart" in error
    assert run(corpus, out, "--restart") == 0
    assert index.manifest.read(out)["encoder"] == LUCENE.identity
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_restart_that_is_killed_leaves_nothing_of_the_other_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, texts: list[str]
) -> None:
    other = write_corpus(
        tmp_path / "other.jsonl", [f"banana{row} {text}" for row, text in enumerate(texts)]
    )
    out = tmp_path / "index"
    remove = shutil.rmtree

    def mortal(path: Path, *more: Any, **options: Any) -> None:
        if path.name == "split":
            raise Killed
        remove(path, *more, **options)

    killed_before_scores(corpus, out)
    with monkeypatch.context() as patch:
        patch.setattr(unfinished.shutil, "rmtree", mortal)
        with pytest.raises(Killed):
            run(other, out, "--restart")
    assert (tmp_path / "index.partial" / "split" / "shards.json").exists()
    assert run(other, out) == 0
    lexical.build(other, len(texts), tmp_path / "undisturbed", LUCENE, progress=False)
    assert files(out / "bm25") == files(tmp_path / "undisturbed")


@pytest.mark.parametrize("name", [postings.WORDS, postings.VOCABULARY, postings.PASSAGES])
def test_a_shard_that_lost_its_end_is_found(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "index"
    killed_before_scores(corpus, out)
    damaged = tmp_path / "index.partial" / "split" / name
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    assert run(corpus, out) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(damaged) in error and "shards.json says" in error and "--restart drops it" in error
    assert run(corpus, out, "--restart") == 0


def test_what_is_mapped_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """A disk that is full is an error before, and not the end of the process at some page."""
    file = tmp_path / "data.npy"
    postings._mapped(file, np.float32, 2**20)
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 4 * 2**20
