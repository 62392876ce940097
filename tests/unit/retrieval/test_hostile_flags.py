"""Flags of the index, serve and `data search` commands with values nobody means.

Each is one line that names the flag and what was given, with status 2, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.data.command import main as data_main
from sg_rlhf.retrieval import index, server, verify


def refused(main: Callable[[list[str]], int], *arguments: object, capsys: Any) -> str:
    """The line of a command that refuses its flags."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.count("\n") == 1 and len(said.err) < 6000
    return str(said.err)


@pytest.mark.parametrize(
    ("main", "flag", "value"),
    [
        (index.main, "--corpus", "a" * 300),
        (index.main, "--encoder", "\n"),
        (index.main, "--max-length", "9" * 5000),
        (server.main, "--max-wait-ms", "-1"),
        (server.main, "--port", "65536"),
        (server.main, "--search", "a=0"),
        (verify.main, "--index", "c\0d"),
    ],
)
def test_a_value_that_is_none(
    main: Callable[[list[str]], int], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in refused(main, f"{flag}={value}", capsys=capsys)


@pytest.fixture
def encyclopedia(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "0", "contents": "\\"A\\"\\nb c d"}\n')
    return file


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus {corpus}/x", "--corpus {corpus}/x: no such file"),
        ("--out {corpus}", "--out {corpus}: {corpus} is a file, expected a folder"),
        ("--out {corpus}/x/y", "--out {corpus}/x/y: {corpus} is a file, expected a folder"),
        ("--out /", "--out /: expected a folder to make"),
        ("--out .", "--out .: expected a folder to make"),
        ("--encoder bm25 --factory HNSW32", "--encoder bm25: has no --factory"),
        ("--encoder {folder}", "--encoder {folder}: "),
        ("--encoder {encoder} --device cuda:99", "--device cuda:99: torch has cpu"),
        ("--encoder {encoder} --max-length 9000000000000000", "--max-length 9000000000000000: "),
        ("--encoder {encoder} --factory nonsense", "--factory nonsense: "),
    ],
)  # fmt: skip
def test_of_the_index_command(
    flags: str,
    message: str,
    encyclopedia: Path,
    encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"corpus": encyclopedia, "folder": tmp_path / "empty", "encoder": encoder}
    names["folder"].mkdir()
    before = sorted(tmp_path.iterdir())
    base = ["--corpus", encyclopedia, "--encoder", "bm25", "--out", tmp_path / "out"]
    given = [word.format(**names) for word in flags.split()]
    capsys.readouterr()
    try:
        status = index.main([str(word) for word in [*base, *given]])
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    assert status == 2
    assert message.format(**names) in said.err.splitlines()[-1]
    assert "Traceback" not in said.err and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "expected --index DIR, or --faiss-index FILE"),
        ("--index {index} --faiss-index f", "expected --index DIR, or --faiss-index FILE"),
        ("--index {corpus}", "--index {corpus}: no such folder"),
        ("--index {folder}", "--index {folder}: no manifest.json"),
        ("--index {index} --corpus {folder}", "corpus {folder} is not there"),
        ("--index {index} --corpus {encoder}/config.json", "is not the one that index"),
        ("--index {index} --encoder e5", "--encoder e5: index {index} is a BM25 index"),
        ("--index {index} --search nprobe=3", "a BM25 index, which takes no --search"),
        ("--index {index} --busy-status 500", "argument --busy-status: "),
        ("--index {index} --host 999.1.1.1", "--host 999.1.1.1 --port 0: "),
        ("--index {index} --host " + "a" * 300, "--port 0: "),
        ("--faiss-index {corpus}", "--faiss-index {corpus}: needs --corpus too"),
        ("--faiss-index {corpus} --corpus {corpus} --encoder {encoder}", "not a faiss index"),
        ("--faiss-index /dev/null --corpus {corpus} --encoder {encoder}", "/dev/null: no such"),
        ("--index {index} --search nprobe=9999999", "expected NAME=N, N from 1 to 1048576"),
    ],
)  # fmt: skip
def test_of_the_server(
    flags: str,
    message: str,
    bm25_index: Path,
    encyclopedia: Path,
    encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {
        "index": bm25_index, "corpus": encyclopedia, "folder": tmp_path / "e", "encoder": encoder,
    }  # fmt: skip
    names["folder"].mkdir()
    given = [word.format(**names) for word in flags.split()]
    try:
        status = server.main(["--port", "0", *given])
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert message.format(**names) in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", ""], "--source"),
        (["--source", "encyclopedia", "y.jsonl"], "encyclopedia cannot be mixed"),
        (["--source", "nq_hotpotqa"], "needs --revision COMMIT"),
        (["--source", "nq_hotpotqa", "--revision", "\0"], "--revision"),
        (["--source", "encyclopedia", "--generate", "people=" + "9" * 20], "--generate"),
        (["--source", "encyclopedia", "--generate", "seed=" + "9" * 5000], "--generate seed"),
        (["--source", "encyclopedia", "--generate", "test_share=nan"], "--generate test_share"),
        (["--source", "encyclopedia", "--generate", "x"], "--generate x: expected KEY=VALUE"),
        (["--source", "encyclopedia", "--seed", "1"], "--seed does not go with"),
    ],
)
def test_of_the_data_command(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(data_main, "search", "--out", tmp_path / "o", *flags, capsys=capsys)
    assert message in error and not list(tmp_path.iterdir())
