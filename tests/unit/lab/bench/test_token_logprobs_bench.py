"""The benchmark of log-probs: what it refuses, its memory figures and its plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench import token_logprobs

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "lab" / "bench" / "token_logprobs.py"


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
def test_a_wrong_argument_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit, match="^2$"):
        token_logprobs.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.full
def test_a_small_run(tmp_path: Path) -> None:
    """A narrow model with many words: the logits show, and ours has none."""
    model, out, plot = (tmp_path / name for name in ("model", "result.json", "plot.png"))
    model.mkdir()
    config = json.loads((ROOT / "sg_rlhf" / "tiny" / "kk_tiny" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100_000}))
    done = subprocess.run(
        [
            sys.executable, str(SCRIPT), "--models", str(model), "--tokens", "",
            "--memory-tokens", "256", "--ways", "logits,ours", "--out", str(out),
            "--plot", str(plot),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    of = {row["way"]: row["update_percent_of_fp32_logits"] for row in result["memory"]}
    assert of["logits"] > 80
    assert 0 < of["ours"] < 30
    assert plot.read_bytes()[:4] == b"\x89PNG"
