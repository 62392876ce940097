"""Building an index: what comes out, what is refused, and that nothing is left half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from transformers import AutoModel

from sg_rlhf.retrieval import dense_build, index, manifest
from sg_rlhf.retrieval.encoder import Encoder
from sg_rlhf.retrieval.search import open_faiss, open_index
from tests.unit.retrieval.conftest import write_corpus


def run(*arguments: object) -> int:
    return index.main([str(argument) for argument in arguments])


def test_bm25_folder(bm25_index: Path, corpus: Path, texts: list[str]) -> None:
    facts = manifest.read(bm25_index)
    assert facts["corpus"]["rows"] == len(texts)
    assert facts["encoder"] == {
        "model": "bm25", "revision": "bm25s-english-1", "k1": 0.9, "b": 0.4
    }  # fmt: skip
    # The index may be moved together with its corpus: no absolute path.
    assert not Path(facts["corpus"]["path"]).is_absolute()
    assert not bm25_index.with_name("index.partial").exists()


def test_flat_folder_holds_the_encoders_vectors(
    flat_index: Path, encoder: Path, texts: list[str]
) -> None:
    stored = faiss.read_index(str(flat_index / "index.faiss"))
    expected = Encoder(str(encoder), max_length=64, device="cpu").encode(texts, "passage")
    assert np.array_equal(stored.reconstruct_n(0, len(texts)), expected)
    assert sorted(path.name for path in flat_index.iterdir()) == [
        "index.faiss", "manifest.json", "offsets.npy"
    ]  # fmt: skip


@pytest.mark.parametrize("factory", ["HNSW32", "IVF15,Flat", "SQ8"])
def test_approximate_indexes_are_built_and_opened(
    tmp_path: Path, corpus: Path, encoder: Path, flat_index: Path, texts: list[str], factory: str
) -> None:
    out = tmp_path / factory
    arguments = ("--corpus", corpus, "--encoder", encoder, "--max-length", 64, "--out", out)
    assert run(*arguments, "--factory", factory) == 0
    queries = [text[:50] for text in texts[:100]]
    found = open_index(out, device="cpu").search(queries, 3)
    expected = open_index(flat_index, device="cpu").search(queries, 3)
    ids = [{hit.document["id"] for hit in hits} for hits in found]
    exact = [{hit.document["id"] for hit in hits} for hits in expected]
    shared = [len(some & all_) / 3 for some, all_ in zip(ids, exact, strict=True)]
    # Of a random encoder neighbours are near by chance, and the processor's rounding decides some:
    # .90 on one machine, .95 on another. A quarter of the lists at random would find a quarter.
    assert np.mean(shared) > 0.75


def test_built_already(bm25_index: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (bm25_index / "manifest.json").stat().st_mtime_ns
    assert run("--corpus", corpus, "--encoder", "bm25", "--out", bm25_index) == 0
    assert "built already" in capsys.readouterr().out
    assert (bm25_index / "manifest.json").stat().st_mtime_ns == before


def test_another_index_is_not_replaced(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_corpus(tmp_path / "other.jsonl", ["alpha", "beta"])
    out = tmp_path / "index"
    assert run("--corpus", other, "--encoder", "bm25", "--out", out) == 0
    assert run("--corpus", corpus, "--encoder", "bm25", "--out", out) == 2
    assert "holds another index (bm25 of bm25, corpus SHA-256" in capsys.readouterr().err
    assert manifest.read(out)["corpus"]["rows"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "other.jsonl"]


def test_somebody_elses_folder_is_left_alone(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.txt").write_text("my work")
    assert run("--corpus", corpus, "--encoder", "bm25", "--out", out) == 2
    assert "not empty" in capsys.readouterr().err
    assert (out / "chapter1.txt").read_text() == "my work"


def test_folders_beside_an_index_are_left_alone(tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "wiki"
    mine = [tmp_path / name / "mine.txt" for name in ("wiki.old", ".wiki.old", "wiki.replaced")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("my work")
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", out)
    assert run(*arguments) == 0
    assert [file.read_text() for file in mine] == ["my work"] * 3


def test_a_folder_of_the_unfinished_builds_name_is_left_alone(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "wiki.partial/mine.txt"
    mine.parent.mkdir()
    mine.write_text("my work")
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", tmp_path / "wiki")
    assert run(*arguments) == 2
    assert "wiki.partial, where the build would write, is no unfinished" in capsys.readouterr().err
    assert mine.read_text() == "my work"


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_a_bad_corpus_leaves_nothing(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["alpha", "beta"])
    corpus.write_text(corpus.read_text() + '{"id": "2"}\n')
    name = "bm25" if kind == "bm25" else str(encoder)
    assert run("--corpus", corpus, "--encoder", name, "--out", tmp_path / "index") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{corpus}, line 3, field contents: missing" in error
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def build_dense(corpus: Path, encoder: Path, out: Path, *more: object) -> int:
    return run(
        "--corpus", corpus, "--encoder", encoder, "--out", out,
        "--max-length", 64, "--device", "cpu", *more,
    )  # fmt: skip


def test_finished_vectors_are_used_again(
    tmp_path: Path,
    corpus: Path,
    encoder: Path,
    flat_index: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a kill leaves: some vectors and a part of the next one, half an index."""
    out, partial = tmp_path / "index", tmp_path / "index.partial"
    vectors = Encoder(str(encoder), max_length=64, device="cpu").encode(
        [f"marker {row}" for row in range(256)], "passage"
    )
    interrupted(partial, corpus, encoder, vectors)
    (partial / "index.faiss").write_bytes(b"half an index")
    assert build_dense(corpus, encoder, out) == 0
    assert "continuing after 256 of 600 passages" in capsys.readouterr().out
    stored = faiss.read_index(str(out / "index.faiss")).reconstruct_n(0, 600)
    untouched = faiss.read_index(str(flat_index / "index.faiss")).reconstruct_n(0, 600)
    assert np.array_equal(stored[:256], vectors), "the finished vectors were made again"
    assert np.array_equal(stored[256:], untouched[256:])
    assert not partial.exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "index.faiss", "manifest.json", "offsets.npy"
    ]  # fmt: skip


def interrupted(partial: Path, corpus: Path, encoder: Path, vectors: np.ndarray) -> Path:
    """An unfinished build that has encoded `vectors`; their file."""
    model = Encoder(str(encoder), device="cpu")
    described = {**model.identity, "max_length": 64, "prompts": model.prompts}
    made_of = [hashlib.sha256(corpus.read_bytes()).hexdigest(), described, "fp32"]
    partial.mkdir(parents=True)
    (partial / "build.json").write_text(json.dumps(made_of))
    file = partial / "vectors.f32"
    file.write_bytes(vectors.tobytes() + b"half")
    return file


@pytest.mark.parametrize("rows", [100, 600])
def test_training_vectors_are_drawn_from_all(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(dense_build, "MIN_TRAIN", 300)
    vectors = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4, axis=1)
    drawn = dense_build.sample(vectors, None)[:, 0]
    assert len(set(drawn.tolist())) == len(drawn) == min(rows, 300)
    assert drawn.max() > rows - 64


def test_another_builds_vectors_are_not_mixed_in(
    tmp_path: Path, corpus: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "index.partial"
    other = write_corpus(tmp_path / "other.jsonl", ["alpha", "beta"])
    file = interrupted(partial, other, encoder, np.zeros((256, 32), np.float32))
    assert build_dense(corpus, encoder, tmp_path / "index") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "an unfinished build of another corpus" in error and "delete the folder" in error
    assert file.exists(), "hours of work were dropped unasked"


def test_an_encoder_that_gives_no_numbers_ends_a_build(
    tmp_path: Path, corpus: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of such vectors an index would be made in which nothing is found."""
    model = AutoModel.from_pretrained(encoder)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] = torch.nan
    shutil.copytree(encoder, tmp_path / "damaged")
    model.save_pretrained(tmp_path / "damaged")
    assert build_dense(corpus, tmp_path / "damaged", tmp_path / "index") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "gives NaN or infinity for the passage in line 1;" in error
    assert "--encoder-dtype fp32" in error and str(corpus) in error
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("nonsense", "nonsense"), ("IVF200,Flat", "100 vectors"), ("PQ8", "100 vectors")],
)
def test_a_factory_that_cannot_be_built(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str], factory: str, reason: str
) -> None:
    few = write_corpus(tmp_path / "few.jsonl", [f"passage {row}" for row in range(100)])
    assert build_dense(few, encoder, tmp_path / "index", "--factory", factory) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"sg-rlhf index: --factory {factory}: " in error and reason in error
    assert not (tmp_path / "index").exists()


def test_a_disk_that_is_too_small(
    tmp_path: Path,
    corpus: Path,
    encoder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sg_rlhf.common.resources.free_disk", lambda _: 1000)
    assert build_dense(corpus, encoder, tmp_path / "index") == 2
    assert "of disk, 1" in capsys.readouterr().err
    assert not (tmp_path / "index.partial").exists()
    assert build_dense(corpus, encoder, tmp_path / "index", "--skip-room-check") == 0


def test_a_plain_faiss_file_is_served_as_it_is(
    flat_index: Path, corpus: Path, encoder: Path, texts: list[str]
) -> None:
    """Search-R1's way: an index file, a corpus file, a model, no manifest."""
    plain = open_faiss(flat_index / "index.faiss", corpus, str(encoder), 64, "cpu")
    queries = [text[:50] for text in texts[:20]]
    assert plain.search(queries, 3) == open_index(flat_index, device="cpu").search(queries, 3)


def test_a_plain_faiss_file_of_another_corpus(
    tmp_path: Path, flat_index: Path, encoder: Path
) -> None:
    other = write_corpus(tmp_path / "other.jsonl", ["alpha", "beta"])
    with pytest.raises(ValueError, match=r"has 600 vectors, --corpus .*other.jsonl has 2 passages"):
        open_faiss(flat_index / "index.faiss", other, str(encoder), device="cpu")
