"""What the benchmarks refuse, in one line and with exit status 2."""

from __future__ import annotations

import subprocess
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
    script: str, arguments: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, f"bench/{script}.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (ROOT / "result.json").exists()
