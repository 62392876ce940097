"""Flags of the index, serve and `data search` commands, one of each type, with values nobody means.

Each is one line that names the flag and what was given, with status 2, and nothing is written. The
flags are taken from the parsers, so one of a type without cases here fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.common import argument_types
from sg_rlhf.data import command as data
from sg_rlhf.data.command import main as data_main
from sg_rlhf.retrieval import command, index, server, verify
from sg_rlhf.tasks.search.source import DATA as SEARCH

ROOT = Path(__file__).parents[3]

#: Of an argument type: what is no such value.
NUMBERS = ("", " ", "-1", "1.5", "1e3", "nan", "x", "1\n2", "9" * 20, "9" * 5000, "\udcff", "\0")
PATHS = ("", "\0", "a" * 300, "b/" * 3000, "\udcff", "c\0d")
WORDS = ("", " ", "\n", "a\tb", "\0", "x" * 5000, "\udcff")
REFUSED: dict[Any, tuple[str, ...]] = {
    argument_types.positive_int: (*NUMBERS, "0"),
    argument_types.non_negative_int: NUMBERS,
    argument_types.non_negative_float: ("", "x", "-1", "nan", "inf", "1e999", "\udcff"),
    argument_types.fraction: ("", "x", "-1", "1", "nan", "inf", "\0"),
    argument_types.path: PATHS,
    argument_types.printable_name: WORDS,
    argument_types.port: (*NUMBERS, "65536"),
    command.setting: ("", "=", "a", "a=", "=1", "a=0", "a=-1", "a=x", "a=" + "9" * 20, "\udcff=1"),
}
CHOICES = ("", "x", "\n", "\udcff", "x" * 5000)


class Parsed(Exception):
    pass


def parser_of(main: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """The parser that a command's `main` makes."""
    seen: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        seen.append(self)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        with pytest.raises(Parsed):
            main([])
    return seen[-1]


MAIN: dict[str, Callable[[list[str]], int]] = {
    "index": index.main, "server": server.main, "verify": verify.main,
}  # fmt: skip


def options(name: str) -> Iterator[argparse.Action]:
    """Those that take a value."""
    if name == "data":
        parser = argparse.ArgumentParser()
        data.add_options(parser, SEARCH)
    else:
        parser = parser_of(MAIN[name])
    removed = argparse.SUPPRESS
    yield from (a for a in parser._actions if a.nargs != 0 and a.help is not removed)


#: Free text, whose cases are below.
TEXTS = {"--revision", "--generate"}
#: The command and flag that stand for all flags of a type.
FLAGS = {
    "choices" if action.choices else action.type: (name, action.option_strings[0])
    for name in (*MAIN, "data")
    for action in options(name)
    if not (name == "data" and action.option_strings[0] in TEXTS)
}
CASES = [
    pytest.param(name, flag, value, id=f"{name} {flag} {value[:9]!r}")
    for kind, (name, flag) in FLAGS.items()
    for value in (CHOICES if kind == "choices" else REFUSED[kind])[::4]
]


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


@pytest.mark.parametrize(("name", "flag", "value"), CASES)
def test_a_value_that_is_none(
    name: str, flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {
        "index": ["--corpus", "c", "--encoder", "bm25", "--out", str(tmp_path / "out")],
        "verify": ["--index", "i"],
        "data": ["search", "--source", "encyclopedia", "--out", str(tmp_path / "out")],
    }.get(name, ["--index", "i"])
    error = refused(MAIN.get(name, data_main), *base, f"{flag}={value}", capsys=capsys)
    assert f"{flag}" in error
    assert not list(tmp_path.iterdir())


@pytest.fixture
def encyclopedia(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "0", "contents": "\\"A\\"\\nb c d"}\n')
    return file


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus {corpus}/x", "--corpus {corpus}/x: no such file"),
        ("--corpus {folder}", "--corpus {folder}: no such file"),
        ("--corpus /dev/null", "--corpus /dev/null: no such file"),
        ("--out {corpus}", "--out {corpus}: is a file, expected a folder"),
        ("--out {corpus}/x/y", "--out {corpus}/x/y: {corpus} is a file, expected a folder"),
        ("--out /", "--out /: expected a folder to make"),
        ("--out .", "--out .: expected a folder to make"),
        ("--encoder bm25 --factory HNSW32", "--encoder bm25: has no --factory"),
        ("--encoder {folder}", "--encoder {folder}: "),
        ("--encoder ../../etc", "--encoder ../../etc: "),
        ("--encoder {encoder} --device tpu", "--device tpu: expected cpu, cuda, or cuda:N"),
        ("--encoder {encoder} --device cuda:99", "--device cuda:99: there are"),
        ("--encoder {encoder} --device cuda:0,cuda:1", "--device cuda:0,cuda:1: expected cpu, "),
        ("--force", "--force: removed, because a build replaces no folder"),
        ("--workers 2", "--workers: removed, because one process encodes"),
        ("--encoder {encoder} --max-length 9000000000000000", "--max-length 9000000000000000: "),
        ("--encoder {encoder} --factory nonsense", "--factory nonsense: "),
        ("--search nprobe=2", "--search: removed, because the server sets it"),
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
        ("--index {index} --search-device cuda", "a BM25 index, which takes no --search"),
        ("--index {index} --cache-mb 5", "--cache-mb: removed, because --cache-size"),
        ("--index {index} --topk 101", "--topk 101: above --max-topk 100"),
        ("--index {index} --max-topk 999999", "--max-topk 999999: an answer has at most"),
        ("--index {index} --max-wait-ms 60001", "--max-wait-ms 60001: at most 60000"),
        ("--index {index} --max-queries 70000", "--max-queries 70000: above --max-pending"),
        ("--index {index} --host 999.1.1.1", "--host 999.1.1.1 --port 0: "),
        ("--index {index} --host ::zz", "--host ::zz --port 0: "),
        ("--index {index} --host " + "a" * 300, "--port 0: "),
        ("--faiss-index {corpus}", "--faiss-index {corpus}: needs --corpus too"),
        ("--faiss-index {corpus} --corpus {corpus} --encoder {encoder}", "not a faiss index"),
        ("--faiss-index /dev/null --corpus {corpus} --encoder {encoder}", "/dev/null: no such"),
        ("--index {index} --search nprobe=9999999", "expected NAME=N, N from 1 to 1048576"),
        ("--index {index} --verify", "--verify: removed, because sg-rlhf verify-index"),
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
        (["--source", "\0"], "--source"),
        (["--source", "x" * 5000], "--source"),
        (["--source", "encyclopedia", "y.jsonl"], "encyclopedia cannot be mixed"),
        (["--source", "nq_hotpotqa"], "needs --revision COMMIT"),
        (["--source", "nq_hotpotqa", "--revision", "\0"], "--revision"),
        (["--source", "nq_hotpotqa", "--revision", "main"], "--revision"),
        (["--source", "encyclopedia", "--generate", "people=" + "9" * 20], "--generate"),
        (["--source", "encyclopedia", "--generate", "people=-1"], "--generate people"),
        (["--source", "encyclopedia", "--generate", "people=nan"], "--generate people=nan"),
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


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        pytest.param((), {}, "expected --index DIR, or --faiss", marks=pytest.mark.full),
        (("--corpus",), {}, "argument --corpus: expected one argument"),
        (("--corpus", ""), {}, "argument --corpus: "),
        (("--corpus", "no such"), {}, "--corpus no such: no such file"),
        pytest.param(
            ("--corpus", "{corpus}"), {"SG_ENCODER": "../no such"}, "--encoder ../no such: ",
            marks=pytest.mark.full,
        ),
        (("--corpus", "{corpus}"), {"SG_INDEX_DIR": "{corpus}"}, "--out {corpus}: is a file"),
        (("--replicas", "2", "--index", "i"), {}, "--replicas: removed, because"),
    ],
)  # fmt: skip
def test_of_the_script(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    encyclopedia: Path,
    tmp_path: Path,
) -> None:
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        ["bash", ROOT / "examples/scripts/serve_retriever.sh",
         *(word.format(corpus=encyclopedia) for word in arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "SG_INDEX_DIR": str(tmp_path / "index"),
             **{name: value.format(corpus=encyclopedia) for name, value in environment.items()}},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert message.format(corpus=encyclopedia) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and sorted(tmp_path.iterdir()) == before
