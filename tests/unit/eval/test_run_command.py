"""``python -m eval.run``: what it prints, and one line for every mistake, with nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.eval.model import fingerprint
from sg_rlhf.eval.run import main

ROOT = Path(__file__).parents[3]
TINY = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"


def test_list_shows_sizes_settings_and_licences(capsys):
    assert main(["--list"]) == 0
    words = capsys.readouterr().out.split()
    text = " ".join(words)
    for expected in ("aime", "675", "n=16", "pass@16", "8192", "greedy", "CC-BY-NC-SA-4.0"):
        assert expected in text


def test_the_help_is_reachable_without_heavy_imports():
    code = (
        "import sys, eval.run\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


MISTAKES = {
    "no suite": ([], "--suite is missing"),
    "unknown benchmark": (["--only", "gsm8k"], "--only gsm8k: not in suite kk"),
    "server without address": (["--engine", "openai"], "--engine openai needs --base-url"),
    "address without server": (["--base-url", "http://x/v1"], "only with --engine openai"),
    "a server's GPUs": (
        ["--engine", "openai", "--base-url", "http://x/v1", "--tensor-parallel", "2"],
        "only with --engine vllm",
    ),
    "no data folder": (["--data-dir", "nowhere"], "--data-dir nowhere: no such folder"),
    "empty data folder": (["--data-dir", "{empty}"], "test_3to7ppl.parquet: no such file"),
    "no model folder": (["--data-dir", "{puzzles}", "--model", "./nowhere"], "./nowhere: no such"),
    "no model in folder": (["--data-dir", "{puzzles}", "--model", "{empty}"], "no config.json"),
    "offline hub": (["--data-dir", "{puzzles}", "--model", "a/b"], "a/b: neither a folder nor in"),
    "revision of a folder": (["--data-dir", "{puzzles}", "--revision", "r"], "has no revisions"),
    "no server": (
        ["--data-dir", "{puzzles}", "--engine", "openai", "--base-url", "http://127.0.0.1:9/v1"],
        "--base-url http://127.0.0.1:9/v1: no OpenAI-compatible server there",
    ),
    "not empty": (["--data-dir", "{puzzles}", "--out", "{puzzles}"], "not empty"),
    "not a run": (["--data-dir", "{puzzles}", "--out", "{puzzles}", "--resume"], "not a run"),
    "out below a file": (
        ["--data-dir", "{puzzles}", "--out", f"{__file__}/deep/run"],
        f"--out {__file__}/deep/run: {__file__} is a file",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(arguments, message, tmp_path, puzzle_folder, capsys):
    (tmp_path / "empty").mkdir()
    places = {"puzzles": str(puzzle_folder), "empty": str(tmp_path / "empty")}
    given = [argument.format(**places) for argument in arguments]
    if message.split()[-1] != "missing":
        out = ["--out", str(tmp_path / "out")]
        given = ["--suite", "kk", "--model", str(TINY), *out, *given]
    before = sorted(os.listdir(puzzle_folder))
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert sorted(os.listdir(puzzle_folder)) == before


def copied_model(folder: Path) -> Path:
    folder.mkdir()
    for path in TINY.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_fingerprint_follows_contents_alone(tmp_path):
    copy = copied_model(tmp_path / "copy")
    (copy / "README.md").write_text("notes")
    os.utime(copy / "model.safetensors", (0, 0))
    assert fingerprint(copy) == fingerprint(TINY)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert fingerprint(copy) != fingerprint(TINY)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_the_fingerprint_covers_configuration_and_tokenizer(name, tmp_path):
    copy = copied_model(tmp_path / "copy")
    (copy / name).write_text((copy / name).read_text() + "\n")
    assert fingerprint(copy) != fingerprint(TINY)
