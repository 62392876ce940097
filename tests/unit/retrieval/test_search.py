"""Opening an index: what does not belong together is refused, with both named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lab.bench.random_encoder import save_random_encoder
from sg_rlhf.retrieval import manifest
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import open_index
from tests.unit.retrieval.conftest import write_corpus


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a corpus of its own and its BM25 index, to be spoilt."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["alpha beta", "gamma", "delta alpha"])
    build(corpus, "bm25", tmp_path / "index")
    return tmp_path


def test_search_gives_passages_with_scores(home: Path) -> None:
    retriever = open_index(home / "index")
    assert len(retriever) == 3
    first, second, blank, unicode = retriever.search(["alpha beta", "GAMMA", "  ", "北京"], 2)
    assert [hit.document["id"] for hit in first] == ["0", "2"]
    assert second[0].document == {"id": "1", "contents": "gamma"}
    assert first[0].score > first[1].score > 0
    assert blank == unicode == []


def test_a_blank_query_finds_nothing_in_a_dense_index_either(flat_index: Path) -> None:
    found = open_index(flat_index, device="cpu").search(["", "film", " \n"], 3)
    assert [len(hits) for hits in found] == [0, 3, 0]


def test_folder_and_corpus_may_move_together(home: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("corpus.jsonl", "index"):
        shutil.move(home / name, moved / name)
    assert len(open_index(moved / "index")) == 3


def test_a_changed_corpus_is_refused(home: Path) -> None:
    corpus = home / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("gamma", "GAMMA"))  # as many bytes as before
    with pytest.raises(ValueError) as error:
        open_index(home / "index")
    for named in (str(corpus), str(home / "index"), "is not the one"):
        assert named in str(error.value)


def test_a_longer_corpus_is_refused(home: Path) -> None:
    with (home / "corpus.jsonl").open("a") as file:
        file.write('{"id": "3", "contents": "epsilon"}\n')
    with pytest.raises(ValueError, match="is not the one that index"):
        open_index(home / "index")


def test_a_copied_corpus_is_accepted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(home / "corpus.jsonl", (1, 1))
    assert len(open_index(home / "index")) == 3
    assert "checking the SHA-256" in capsys.readouterr().err


def test_a_corpus_elsewhere_is_named_by_hand(home: Path) -> None:
    (home / "corpus.jsonl").rename(home / "moved.jsonl")
    with pytest.raises(ValueError, match=r"corpus.jsonl is not there \(--corpus FILE"):
        open_index(home / "index")
    assert len(open_index(home / "index", corpus=home / "moved.jsonl")) == 3


def test_another_encoder_is_refused(flat_index: Path, tmp_path: Path, texts: list[str]) -> None:
    other = tmp_path / "other_encoder"
    save_random_encoder(other, texts, seed=1)
    with pytest.raises(ValueError) as error:
        open_index(flat_index, encoder=str(other), device="cpu")
    recorded = manifest.read(flat_index)["encoder"]["fingerprint"]
    for named in ("other_encoder", "e5_random", str(flat_index), recorded[:24], "is not the one"):
        assert named in str(error.value)


def test_an_encoder_that_moved_is_accepted(flat_index: Path, encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "renamed")
    assert len(open_index(flat_index, encoder=str(tmp_path / "renamed"), device="cpu")) == 600


def test_an_encoder_that_is_gone_is_not_looked_for_on_the_hub(
    flat_index: Path, tmp_path: Path
) -> None:
    shutil.copytree(flat_index, tmp_path / "a" / "b" / "index")
    facts = json.loads((tmp_path / "a" / "b" / "index" / "manifest.json").read_text())
    facts["corpus"]["path"] = os.path.relpath(
        manifest.check_corpus(flat_index, facts["corpus"]), tmp_path / "a" / "b" / "index"
    )
    (tmp_path / "a" / "b" / "index" / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"its encoder .* is not there \(--encoder says"):
        open_index(tmp_path / "a" / "b" / "index", device="cpu")


def test_words_split_by_another_version_are_refused(home: Path) -> None:
    facts = manifest.read(home / "index")
    facts["encoder"]["revision"] = "older"
    manifest.write(home / "index", facts)
    with pytest.raises(ValueError, match="build the index again"):
        open_index(home / "index")


def test_an_encoder_for_bm25_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="is a BM25 index, without one"):
        open_index(home / "index", encoder="intfloat/e5-base-v2")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"made_by": "someone"}'])
def test_what_is_no_index_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"no manifest.json of sg_rlhf.retrieval.index in it"):
        open_index(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        open_index(tmp_path / "nowhere")
