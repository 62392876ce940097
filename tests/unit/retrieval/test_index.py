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


def test_another_index_is_replaced_only_by_force(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_corpus(tmp_path / "other.jsonl", ["alpha", "beta"])
    out = tmp_path / "index"
    assert run("--corpus", other, "--encoder", "bm25", "--out", out) == 0
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", out)
    assert run(*arguments) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert manifest.read(out)["corpus"]["rows"] == 2
    assert run(*arguments, "--force") == 0
    assert manifest.read(out)["corpus"]["rows"] == 600
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


@pytest.mark.parametrize("force", [False, True])
def test_folders_beside_an_index_are_left_alone(tmp_path: Path, corpus: Path, force: bool) -> None:
    out = tmp_path / "wiki"
    mine = [tmp_path / name / "mine.txt" for name in ("wiki.old", ".wiki.old", "wiki.replaced")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("my work")
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", out)
    assert run(*arguments) == 0
    if force:
        assert run(*arguments, "--force") == 0
    assert [file.read_text() for file in mine] == ["my work"] * 3


def test_force_replaces_an_index_and_nothing_else(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wiki"
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", out, "--force")
    assert run(*arguments) == 0
    (out / "notes.txt").write_text("my work")
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert f"--out {out}: notes.txt in it is no part of an index" in error
    assert "move it away" in error
    assert (out / "notes.txt").read_text() == "my work"
    (out / "notes.txt").unlink()
    (out / "manifest.json").write_text("{")  # a damaged index is one still
    assert run(*arguments) == 0
    assert manifest.read(out)["corpus"]["rows"] == 600


def test_what_comes_into_the_folder_while_it_is_built_stays(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "wiki"
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--out", out, "--force")
    assert run(*arguments) == 0

    def describe(*given: object, **options: object) -> dict[str, object]:
        (out / "notes.txt").write_text("my work")
        return described(*given, **options)

    described = manifest.describe_files
    monkeypatch.setattr(manifest, "describe_files", describe)
    assert run(*arguments) == 2
    assert (out / "notes.txt").read_text() == "my work"
    assert manifest.read(out)["corpus"]["rows"] == 600


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


def test_a_link_that_is_replaced_leaves_what_it_leads_to(tmp_path: Path, corpus: Path) -> None:
    out, real = tmp_path / "wiki", tmp_path / "disk"
    arguments = ("--corpus", corpus, "--encoder", "bm25", "--force", "--out")
    assert run(*arguments, real) == 0
    out.symlink_to(real)
    assert run(*arguments, out) == 0
    assert not out.is_symlink()
    for folder in (out, real):
        assert manifest.read(folder)["corpus"]["rows"] == 600


def test_new_search_parameters_are_whole_or_not_there(
    tmp_path: Path, corpus: Path, encoder: Path
) -> None:
    """Killed at any point, what is there is the index as it was."""
    out = tmp_path / "index"
    arguments = ("--corpus", corpus, "--encoder", encoder, "--max-length", 64, "--out", out)
    assert run(*arguments, "--factory", "IVF8,Flat", "--search", "nprobe=2") == 0
    before = (out / "manifest.json").read_bytes()
    # Whoever has the file open reads the old one to its end: it is replaced, not written over.
    with (out / "manifest.json").open("rb") as reader:
        assert run(*arguments, "--factory", "IVF8,Flat", "--search", "nprobe=3") == 0
        assert reader.read() == before
    assert manifest.read(out)["search"] == {"nprobe": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoder", "bm25", "--factory", "Flat"], "--encoder bm25: has no --factory"),
        (["--encoder", "/no/such/model"], "--encoder /no/such/model: "),
        (["--encoder", "bm25", "--corpus", "/no/such/file"], "--corpus /no/such/file: no such"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    out = tmp_path / "index"
    assert run("--corpus", corpus, "--out", out, *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sg_rlhf.retrieval.index: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


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
        "--max-length", 64, "--shard-rows", 256, "--device", "cpu", *more,
    )  # fmt: skip


def test_finished_shards_are_used_again(
    tmp_path: Path,
    corpus: Path,
    encoder: Path,
    flat_index: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a kill leaves: a plan, one of three shards, half an index."""
    out, partial = tmp_path / "index", tmp_path / "index.partial"
    vectors = Encoder(str(encoder), max_length=64, device="cpu").encode(
        [f"marker {row}" for row in range(256)], "passage"
    )
    interrupted(partial, corpus, encoder, vectors)
    (partial / "index.faiss").write_bytes(b"half an index")
    assert build_dense(corpus, encoder, out) == 0
    assert "continuing after 1 of 3 shards" in capsys.readouterr().out
    stored = faiss.read_index(str(out / "index.faiss")).reconstruct_n(0, 600)
    untouched = faiss.read_index(str(flat_index / "index.faiss")).reconstruct_n(0, 600)
    assert np.array_equal(stored[:256], vectors), "the finished shard was made again"
    assert np.array_equal(stored[256:], untouched[256:])
    assert not partial.exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "index.faiss", "manifest.json", "offsets.npy"
    ]  # fmt: skip


def interrupted(
    partial: Path, corpus: Path, encoder: Path, vectors: np.ndarray, **other: object
) -> None:
    """An unfinished build whose first shard is `vectors`."""
    model = Encoder(str(encoder), device="cpu")
    plan: dict[str, object] = {
        "corpus_sha256": hashlib.sha256(corpus.read_bytes()).hexdigest(),
        "encoder": {
            **model.identity,
            "max_length": 64,
            "prompts": model.prompts,
            "dtype": "fp32",
        },
        "shard_rows": 256,
    }
    (partial / "vectors").mkdir(parents=True)
    (partial / "lock").touch()
    (partial / "plan.json").write_text(json.dumps(plan | other))
    np.save(partial / "vectors/000000.npy", vectors)


@pytest.mark.full
def test_several_processes_make_the_same_index(
    tmp_path: Path, corpus: Path, encoder: Path, flat_index: Path
) -> None:
    assert build_dense(corpus, encoder, tmp_path / "index", "--workers", 2) == 0
    stored = (tmp_path / "index" / "index.faiss").read_bytes()
    assert stored == (flat_index / "index.faiss").read_bytes()


@pytest.mark.parametrize("rows", [100, 600])
def test_training_vectors_are_drawn_from_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(dense_build, "MIN_TRAIN", 300)
    shards = dense_build.Shards(tmp_path, tmp_path, tmp_path, rows, 64, Encoder, None)
    for number in shards.missing:
        some = np.arange(number * 64, min(rows, number * 64 + 64), dtype=np.float32)
        np.save(shards.path(number), np.repeat(some[:, None], 4, axis=1))
    index, _ = dense_build.new_index("SQ8", 4, {})
    sample = dense_build._sample(index, shards)[:, 0]
    assert len(set(sample.tolist())) == len(sample) == min(rows, 300)
    assert sample.max() > rows - 64


def test_another_builds_shards_are_not_mixed_in(
    tmp_path: Path, corpus: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "index.partial"
    zeros = np.zeros((256, 32), np.float32)
    interrupted(partial, corpus, encoder, zeros, corpus_sha256="0" * 64)
    assert build_dense(corpus, encoder, tmp_path / "index") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "unfinished build with corpus_sha256 0000" in error and "--restart" in error
    assert (partial / "vectors/000000.npy").exists(), "hours of work were dropped unasked"
    assert build_dense(corpus, encoder, tmp_path / "index", "--restart") == 0


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
    assert f"sg_rlhf.retrieval.index: --factory {factory}: " in error and reason in error
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
