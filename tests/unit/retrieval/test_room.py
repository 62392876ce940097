"""What a build takes is said before, and refused in one line where it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sg_rlhf.common import resources
from sg_rlhf.common.index_sizes import (
    KINDS,
    PROCESS_BYTES,
    assemble_memory,
    build_disk,
    finished_disk,
    spec,
)
from sg_rlhf.retrieval import index, room

WIKI = 21_015_324


def run(*arguments: object) -> int:
    return index.main([str(argument) for argument in arguments])


def test_wiki_18_by_arithmetic() -> None:
    flat, half = (spec("flat", WIKI, 768, numbers) for numbers in ("fp32", "fp16"))
    assert flat.index_bytes == pytest.approx(64.56e9, rel=1e-3)
    assert half.index_bytes * 2 == flat.index_bytes
    assert build_disk(flat) == finished_disk(flat)
    graph = spec("hnsw", WIKI, 768, build={"M": 64})
    assert graph.graph_bytes == pytest.approx(11.1e9, rel=0.02)
    # At most 1.1 times the index, and what the libraries take.
    for kind in KINDS:
        made = spec(kind, WIKI, 768)
        assert assemble_memory(made, 0, 16) < 1.1 * made.index_bytes + PROCESS_BYTES


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("flat", {"nlist": 3}, "--build nlist=3: --type flat has none"),
        ("hnsw", {"m": 3}, "--build m=3: --type hnsw has M, efConstruction"),
        ("hnsw", {"M": 1}, "--build M=1: expected 2 to 512"),
        ("ivf", {"nlist": 101}, "--build nlist=101: expected 1 to 100"),
        ("ivfpq", {"pq_m": 7}, "--build pq_m=7: expected a divisor of the vectors' length 32"),
    ],
)
def test_parameters_that_a_kind_has_not(kind: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        spec(kind, 100, 32, build=given)
    assert str(error.value) == message


def test_a_dry_run_builds_nothing(
    tmp_path: Path, corpus: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bm25", encoder):
        assert run("--corpus", corpus, "--encoder", name, "--out", tmp_path / "i", "--dry-run") == 0
        said = capsys.readouterr().out
        assert all(f"\n  {word} " in said for word in ("disk", "memory", "free"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["disk", "memory"])
@pytest.mark.parametrize("name", ["bm25", "dense"])
def test_what_is_not_there_is_refused(
    tmp_path: Path,
    corpus: Path,
    encoder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    name: str,
) -> None:
    monkeypatch.setattr(resources, f"free_{what}", lambda *_: 1000)
    arguments = (
        "--corpus", corpus, "--encoder", "bm25" if name == "bm25" else encoder,
        "--out", tmp_path / "index",
    )  # fmt: skip
    assert run(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f" of {what}, 1000 bytes are free" in error or f" of {what}, 1 KB are free" in error
    assert "--skip-room-check" in error
    assert list(tmp_path.iterdir()) == []
    assert run(*arguments, "--skip-room-check") == 0


def test_what_an_unfinished_build_has_is_not_asked_for_again(tmp_path: Path, corpus: Path) -> None:
    job = index.Build(corpus, "e5", tmp_path / "index")
    assert room._on_disk(job) == 0
    job.partial.mkdir()
    (job.partial / "vectors.faiss").write_bytes(bytes(2**20))
    assert room._on_disk(job) >= 2**20


def test_recall_is_in_the_manifest_and_parameters_can_change(
    tmp_path: Path, corpus: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index"
    arguments = (
        "--corpus", corpus, "--encoder", encoder, "--max-length", 64, "--out", out,
        "--type", "ivf", "--build", "nlist=8",
    )  # fmt: skip
    assert run(*arguments) == 0
    assert "found of the exact 10 best" in capsys.readouterr().out
    facts = json.loads((out / "manifest.json").read_text())
    assert (facts["parameters"], facts["search"]) == ({"nlist": 8}, {"nprobe": 2})
    by_probes = {row["nprobe"]: row for row in facts["recall"]["measured"]}
    assert by_probes[1]["recall_at_10"] < by_probes[4]["recall_at_10"] <= 1
    assert facts["recall"]["queries"] == 256

    before = (out / "index.faiss").stat().st_mtime_ns
    assert run(*arguments, "--search", "nprobe=8") == 0
    assert "is searched with nprobe=8 from now on" in capsys.readouterr().out
    facts = index.manifest.read(out)
    assert facts["search"] == {"nprobe": 8}
    assert (out / "index.faiss").stat().st_mtime_ns == before
    assert run(*arguments[:-1], "nlist=9") == 2
    assert "--force replaces it" in capsys.readouterr().err
