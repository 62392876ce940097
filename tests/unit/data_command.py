"""Reading what `sg-rlhf data` wrote, and what it says when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.data import command as data


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def refusal(domain: str, capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on stderr of a refused request."""
    capsys.readouterr()
    try:
        status = data.main([domain, *map(str, args)])
    except SystemExit as stop:  # argparse
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err
