"""`sg-rlhf serve-env`: wrong input is one line and exit status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sg_rlhf.environments.command import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kkk", "--data", "{data}"], "domain 'kkk': expected one of kk, math, search"),
        (["kk", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["kk", "--data", "{empty}"], "empty.jsonl: no rows"),
        (["kk", "--data", "{chat}"], "chat.jsonl, line 1: expected text as 'input'"),
        (["kk", "--data", "{data}", "--set", "url=x"], "--set url=x: expected KEY=VALUE"),
        (["kk", "--data", "{data}", "--port", "70000"], "--port: 70000: expected a port"),
        (["kk", "--data", "{data}", "--port", "-1"], "--port: -1: expected a port"),
        (
            ["search", "--data", "{data}", "--set", "max_turns=many"],
            "max_turns=many: Input should be a va",
        ),
        (
            ["search", "--data", "{data}", "--set", "turns=2"],
            "--set turns=2: expected KEY=VALUE, each key once, of url,",
        ),
        (["search", "--data", "{data}"], "expected"),
        (["kk"], "the following arguments are required: --data"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("data", "empty", "chat")}
    files["data"].write_text(json.dumps({"input": "Who?", "answer": "no list"}) + "\n")
    files["empty"].write_text("")
    files["chat"].write_text(json.dumps({"input": [{"role": "user"}], "answer": "x"}) + "\n")
    try:
        status = main([word.format(**files) for word in words])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_without_openenv_the_line_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "sg_rlhf.environments.openenv", raising=False)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input": "Who?", "answer": "(1) Zoey is a knight"}) + "\n")
    assert main(["kk", "--data", str(data)]) == 2
    assert capsys.readouterr().err.strip().endswith("pip install 'sg-rlhf[openenv]'")
