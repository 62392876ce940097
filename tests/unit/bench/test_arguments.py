"""What the benchmarks refuse, in one line and with exit status 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OUT = ("--out", "result.json")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("growth", (*OUT, "--repeats", "0"), "--repeats: expected a whole number, 1 or more"),
        ("kk_generator", (*OUT, "--turns", "x"), "1 or more, not x"),
        ("kk_generator", (*OUT, "--given", "nowhere"), "--given nowhere: no lib_kk.py in it"),
        ("stock_openrlhf", (*OUT, "--rollouts", "2"), "3 or more, not 2"),
        ("token_weighting", (*OUT, "--steps", "none"), "--steps none: no recipe"),
        ("waiting_ranks", (*OUT, "--draws", "0"), "1 or more, not 0"),
        ("waiting_ranks", (*OUT, "--recorded", "none"), "--recorded none: no samples.jsonl"),
        ("weight_sync", (*OUT, "--buckets", "0"), "1 or more, not 0"),
        ("run", ("--out", "Makefile"), "not a folder"),
    ],
)
def test_a_wrong_argument_is_one_line(
    script: str,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"bench/{script}.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"bench/{script}.py", run_name="__main__")
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert message in error.splitlines()[-1]
    assert not (ROOT / "result.json").exists()
