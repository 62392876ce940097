"""`make bench`: what benchmarks measure with, refuse and start."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from lab.bench import claims, run
from lab.bench.claims import Bench
from lab.bench.common import exponent, peak_bytes, rank_outputs
from sg_rlhf.overlay.patches import flash_attn_shim, table

# -- `make bench`: each benchmark on its own, one that fails ends no other -----------------------


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


# -- What benchmarks measure with: bytes by allocation, and the exponent of growth ---------------


MIB = 2**20


def tensor(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_bytes_at_one_time_and_not_in_all() -> None:
    def one_after_the_other() -> None:
        for mib in (3, 2, 1):
            tensor(mib)

    def together() -> None:
        first = tensor(3)
        second = tensor(2)
        del first
        third = tensor(1)
        del second, third

    assert peak_bytes(one_after_the_other) == pytest.approx(3 * MIB, rel=0.01)
    assert peak_bytes(together) == pytest.approx(5 * MIB, rel=0.01)


def test_what_was_there_before_does_not_count() -> None:
    before = tensor(8)
    assert peak_bytes(lambda: before.add_(1)) < MIB


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power(power: float) -> None:
    sizes = [1, 10, 20, 80]
    seconds = [5.0, *(0.3 * size**power for size in sizes[1:])]  # the smallest is not looked at
    assert exponent(sizes, seconds) == pytest.approx(power)


# -- What the benchmarks refuse, in one line and with exit status 2 ------------------------------


ROOT = Path(__file__).parents[4]
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
    monkeypatch.setattr(sys, "argv", [f"lab/bench/{script}.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "bench"))
    # lab.bench.tiny_update installs the platform when it is imported.
    monkeypatch.setattr(table, "install", flash_attn_shim.install)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"lab/bench/{script}.py", run_name="__main__")
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert message in error.splitlines()[-1]
    assert not (ROOT / "result.json").exists()


# -- Processes of one job: all of their lines, and an end for those that would wait --------------


SAYS = "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
RANKS_FAILS = """
import os, sys, time

if os.environ["RANK"] == "1":
    print("x" * 100_000, file=sys.stderr)  # more than a pipe holds
    sys.exit("no memory")
time.sleep(3600)
"""


def test_each_rank_says_its_own() -> None:
    assert rank_outputs([sys.executable, "-c", SAYS], 3) == ["0 of 3\n", "1 of 3\n", "2 of 3\n"]


def test_one_that_fails_ends_the_others() -> None:
    with pytest.raises(SystemExit, match="rank 1: x+\nno memory"):
        rank_outputs([sys.executable, "-c", RANKS_FAILS], 2)


def test_one_that_hangs_is_ended() -> None:
    with pytest.raises(SystemExit, match="not done after 1 s"):
        rank_outputs([sys.executable, "-c", "import time; time.sleep(60)"], 1, limit=1)
