"""The corpus of an index, and the manifest that says what it was made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.retrieval import manifest, verify
from sg_rlhf.retrieval.corpus import Corpus, iterate_contents, parse, scan
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import open_index
from tests.unit.retrieval.conftest import write_corpus

# -- Corpora by offset: any passage comes back as it was, and a bad line is named ----------------


def test_every_row_comes_back(corpus: Path, texts: list[str]) -> None:
    opened = Corpus(corpus, scan(corpus)[0])
    assert len(opened) == len(texts)
    for row in (0, 1, 7, len(texts) - 1):
        assert opened.document(row) == {"id": str(row), "contents": texts[row]}
    assert opened.contents(range(3, 9)) == texts[3:9]
    assert list(iterate_contents(corpus)) == texts


def test_scan_hashes_the_file_and_finds_the_same_offsets_unchecked(corpus: Path) -> None:
    offsets, sha256 = scan(corpus)
    assert sha256 == hashlib.sha256(corpus.read_bytes()).hexdigest()
    quick, _ = scan(corpus, check=False)
    assert np.array_equal(offsets, quick)
    assert offsets[-1] == corpus.stat().st_size


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = write_corpus(tmp_path_factory.mktemp("any") / "corpus.jsonl", texts)
    opened = Corpus(path, scan(path)[0])
    assert [opened.document(row)["contents"] for row in range(len(opened))] == texts


def test_without_a_final_newline_and_with_windows_ones(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "0", "contents": "a"}\r\n{"id": "1", "contents": "b"}')
    opened = Corpus(path, scan(path)[0])
    assert [opened.document(row)["contents"] for row in range(2)] == ["a", "b"]


def test_other_fields_are_left_out() -> None:
    line = json.dumps({"id": "0", "contents": "x", "title": "t"}).encode()
    assert parse(line, Path("c"), 1) == {"id": "0", "contents": "x"}


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


# -- Damage of an index: each start or `verify` finds it, in one line ----------------------------


FILES = ("offsets.npy", "bm25/data.csc.index.npy", "bm25/vocab.index.json")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["alpha beta", "gamma", "delta alpha"])
    build(corpus, "bm25", tmp_path / "index")
    return tmp_path / "index"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_files_hash_is_that_of_sha256sum(index: Path) -> None:
    facts = manifest.read(index)
    for name in FILES:
        expected = hashlib.sha256((index / name).read_bytes()).hexdigest()
        assert facts["sha256"][name] == expected
    assert set(facts["files"]) == set(facts["sha256"])


def test_damage_inside_a_large_file_is_found_by_verify_alone(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifest, "SMALL", 10)
    flip(index / FILES[0], -1)
    open_index(index)
    assert verify.main(["--index", str(index)]) == 2
    assert f"{index / FILES[0]}: its content is not what was built" in capsys.readouterr().err


def test_verify_reads_the_corpus_whatever_its_time_stamp(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--index", str(index)]
    assert verify.main(arguments) == 0
    assert "every byte is as it was built" in capsys.readouterr().out
    corpus = index.parent / "corpus.jsonl"
    status = corpus.stat()
    corpus.write_text(corpus.read_text().replace("gamma", "gamme"))
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))
    open_index(index)
    assert verify.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("sg-rlhf verify-index: ") and str(corpus) in line


def change(index: Path, **entries: object) -> None:
    facts = json.loads((index / "manifest.json").read_text())
    for name, value in entries.items():
        if value is None:
            del facts[name]
        else:
            facts[name] = value
    (index / "manifest.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"kind": None}, ", kind: Field required"),
        ({"format": None}, ", format: missing, this version reads 1"),
        ({"format": "1"}, ", format: '1', this version reads 1"),
        ({"files": None}, ", files: Field required"),
        ({"files": {}}, ", files: Dictionary should have at least 1 item"),
        ({"corpus": None}, ", corpus: Field required"),
        ({"corpus": {"path": "c"}}, ", corpus.rows: Field required"),
        ({"encoder": {}}, ", encoder.model: Field required"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(
    index: Path, entries: dict[str, object], reason: str
) -> None:
    change(index, **entries)
    with pytest.raises(ValueError) as error:
        open_index(index)
    assert str(error.value).startswith(f"{index / 'manifest.json'}{reason}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\0" * 40])
def test_a_vocabulary_that_cannot_be_read_is_named(index: Path, content: str) -> None:
    (index / "bm25" / "vocab.index.json").write_text(content)
    change(index, **manifest.describe_files(index))
    with pytest.raises(ValueError, match=rf"{index / 'bm25'}: cannot be read \("):
        open_index(index).search(["alpha"], 1)


def test_parts_of_two_indexes_are_refused(index: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", ["alpha", "beta"])
    build(other, "bm25", tmp_path / "two")
    shutil.rmtree(index / "bm25")
    shutil.copytree(tmp_path / "two" / "bm25", index / "bm25")
    with pytest.raises(ValueError, match=r"but its index was built with|not what was built"):
        open_index(index)
    change(index, **manifest.describe_files(index))
    with pytest.raises(ValueError, match="2 entries for 3 passages"):
        open_index(index)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
    "a bit at the start": lambda path: flip(path, 0),
    "a bit in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a bit at the end": lambda path: flip(path, -1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("kind", ["bm25", "flat"])
def test_every_file_of_an_index_with_every_damage(
    kind: str, bm25_index: Path, flat_index: Path, tmp_path: Path
) -> None:
    whole = bm25_index if kind == "bm25" else flat_index
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(names) > 2
    for name in names:
        for what, damage in DAMAGES.items():
            folder = shutil.copytree(whole, tmp_path / "index")
            damage(folder / name)
            if name.name == "manifest.json" and what == "a bit in the middle":
                flip(folder / name, 0)  # one bit of a path is no damage
            with pytest.raises(ValueError) as error:
                open_index(folder, device="cpu")
            line = str(error.value)
            assert "\n" not in line and (str(folder / name) in line or "manifest.json" in line), (
                what
            )
            shutil.rmtree(folder)


def test_every_file_of_an_encoder_with_a_damage(
    flat_index: Path, encoder: Path, tmp_path: Path
) -> None:
    """Also in what transformers, tokenizers and safetensors say in words of their own."""
    for path in encoder.iterdir():
        for what in ("emptied", "a bit in the middle", "cut"):
            folder = shutil.copytree(encoder, tmp_path / "encoder")
            DAMAGES[what](folder / path.name)
            with pytest.raises(ValueError, match="encoder") as error:
                open_index(flat_index, encoder=str(folder), device="cpu")
            assert "\n" not in str(error.value), (path.name, what)
            shutil.rmtree(folder)
    config = json.loads((encoder / "config.json").read_text())
    folder = shutil.copytree(encoder, tmp_path / "encoder")
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ValueError, match="--encoder .*expected bm25, a model folder"):
        open_index(flat_index, encoder=str(folder), device="cpu")
