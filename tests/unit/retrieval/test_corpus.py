"""Corpora by offset: any passage comes back as it was, and a bad line is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.retrieval.corpus import (
    Corpus,
    iterate_contents,
    load_offsets,
    parse,
    save_offsets,
    scan,
)
from tests.unit.retrieval.conftest import write_corpus


def test_every_row_comes_back(corpus: Path, texts: list[str]) -> None:
    opened = Corpus(corpus, scan(corpus).offsets)
    assert len(opened) == len(texts)
    for row in (0, 1, 7, len(texts) - 1):
        assert opened.document(row) == {"id": str(row), "contents": texts[row]}
    assert opened.contents(range(3, 9)) == texts[3:9]
    assert list(iterate_contents(corpus)) == texts


def test_scan_hashes_the_file_and_finds_the_same_offsets_unchecked(corpus: Path) -> None:
    found = scan(corpus)
    assert found.sha256 == hashlib.sha256(corpus.read_bytes()).hexdigest()
    quick = scan(corpus, check=False)
    assert np.array_equal(found.offsets, quick.offsets)
    assert found.offsets[-1] == corpus.stat().st_size


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = write_corpus(tmp_path_factory.mktemp("any") / "corpus.jsonl", texts)
    opened = Corpus(path, scan(path).offsets)
    assert [opened.document(row)["contents"] for row in range(len(opened))] == texts


def test_without_a_final_newline_and_with_windows_ones(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "0", "contents": "a"}\r\n{"id": "1", "contents": "b"}')
    opened = Corpus(path, scan(path).offsets)
    assert [opened.document(row)["contents"] for row in range(2)] == ["a", "b"]


def test_other_fields_are_left_out() -> None:
    line = json.dumps({"id": "0", "contents": "x", "title": "t"}).encode()
    assert parse(line, Path("c"), 1) == {"id": "0", "contents": "x"}


def test_offsets_are_mapped_from_their_file(tmp_path: Path, corpus: Path) -> None:
    offsets = scan(corpus).offsets
    save_offsets(tmp_path / "offsets.npy", offsets)
    loaded = load_offsets(tmp_path / "offsets.npy")
    assert isinstance(loaded, np.memmap)
    assert np.array_equal(loaded, offsets)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "line 2: not JSON"),
        ("", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"id": "1", "contents": "x", "n": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ('["0", "text"]', "line 2: list, expected an object"),
        ('{"contents": "x"}', "line 2, field id: missing, expected a string"),
        ('{"id": 5, "contents": "x"}', "line 2, field id: 5, expected a string"),
        ('{"id": "1", "text": "x"}', "line 2, field contents: missing, expected a string"),
        ('{"id": "1", "contents": null}', "line 2, field contents: None, expected a string"),
        ('{"id": "1", "contents": "\\ud800"}', "line 2, field contents: a lone surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"id": "0", "contents": "x"}}\n{line}\n{{"id": "2", "contents": "y"}}\n')
    with pytest.raises(ValueError) as error:
        scan(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(ValueError, match="no passages"):
        scan(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("names", [("0", "1", "1"), ("a", "b", "a"), ("0", "0", "2")])
def test_an_id_that_comes_twice_is_named_with_both_lines(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": n, "contents": "x"}) + "\n" for n in names))
    first = names.index(max(names, key=names.count))
    last = len(names) - 1 - names[::-1].index(names[first])
    with pytest.raises(ValueError) as error:
        scan(path)
    assert f"{path}, line {last + 1}, field id: {names[first]!r}" in str(error.value)
    assert f"which line {first + 1} has too" in str(error.value)


def test_ids_that_are_no_rows_are_fine_while_they_differ(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    names = ["0", "1", "10", "01", "1 ", "", "\u0661"]
    path.write_text("".join(json.dumps({"id": n, "contents": "x"}) + "\n" for n in names))
    assert len(scan(path).offsets) == 8
