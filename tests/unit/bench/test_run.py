"""`make bench`: each benchmark on its own, one that fails ends no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import claims, run
from bench.claims import Bench

WRITES = """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps({"ratio": 60}))
"""
SKIPS = "import sys; print('needs a network'); sys.exit(77)"
FAILS = "raise ValueError('no such model')"


def test_each_is_run_and_the_ratios_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"kk_generator": WRITES, "growth": SKIPS, "token_weighting": FAILS}
    for name, program in programs.items():
        file = tmp_path / f"{name}.py"
        file.write_text(program)
        monkeypatch.setitem(claims.BENCHES, name, Bench(f"{name}.json", "", str(file)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "growth.json").write_text("{}")  # of an earlier time
    assert run.main(["--out", str(out), "--only", *programs]) == 1
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if " s  " in line}
    assert lines["kk_generator"].endswith("s  done")
    assert lines["growth"].endswith("s  skipped: needs a network")
    assert "s  failed: ValueError: no such model, see" in lines["token_weighting"]
    assert "Knights & Knaves generator, 7 people 60x, committed" in said
    assert "not run  growth with the vocabulary" in said
    assert run.main(["--out", str(out), "--only", "growth"]) == 2  # nothing to compare


def test_what_is_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setitem(claims.BENCHES, "growth", Bench("growth.json", "", str(slow)))
    monkeypatch.setattr(run, "LIMIT", 1)
    assert run.run("growth", tmp_path).startswith("failed: not done after 1 s")
