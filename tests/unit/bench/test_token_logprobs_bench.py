"""The benchmark of log-probs: what it refuses, its memory figures and its plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "bench" / "token_logprobs.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "nobody/none"), "argument --models: 'nobody/none' is not known"),
        (("--ways", "ours,theirs"), "argument --ways: 'theirs' is not known"),
        (("--tokens", "0"), "argument --tokens: invalid"),
        (("--repeats", "0"), "argument --repeats: expected a whole number, 1 or more, not 0"),
        (("--draw", "none.json"), "--draw none.json: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_small_run(tmp_path: Path) -> None:
    """256 tokens of the smallest real head: the logits show, and ours has none."""
    out, plot = tmp_path / "result.json", tmp_path / "plot.png"
    done = run(
        "--models", "Qwen/Qwen2.5-0.5B", "--tokens", "", "--memory-tokens", "256",
        "--ways", "logits,ours,ours_triton", "--out", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["skipped"] == {"ours_triton": "a kernel for GPUs: needs CUDA"}
    of = {row["way"]: row["update_percent_of_fp32_logits"] for row in result["memory"]}
    assert of["logits"] > 80
    assert 0 < of["ours"] < 30
    assert plot.read_bytes()[:4] == b"\x89PNG"
