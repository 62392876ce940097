"""Ratios beside the committed ones: what got worse is named, what was not run is no fault."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench import claims, compare
from lab.bench.claims import RESULTS, Claim

ROOT = Path(__file__).parents[4]
TIME = Claim("time", "a peer", "growth", "ratio", 1.0, tolerance=0.1)
SPEED = Claim("speed", "a peer", "growth", "ratio", 50, lower=False, tolerance=0.1)


@pytest.mark.parametrize(
    ("claim", "new", "old", "status"),
    [
        (TIME, 1.11, 1.0, "worse"),
        (TIME, 1.09, 1.0, "same"),
        (TIME, 0.91, 1.0, "same"),
        (TIME, 0.80, 1.0, "better"),
        (SPEED, 44.0, 50.0, "worse"),
        (SPEED, 46.0, 50.0, "same"),
        (SPEED, 60.0, 50.0, "better"),
        (TIME, 7.0, None, "new"),
    ],
)
def test_worse_is_in_the_direction_of_the_claim(
    claim: Claim, new: float, old: float | None, status: str
) -> None:
    found = compare.finding(claim, {"ratio": new}, None if old is None else {"ratio": old})
    assert (found.status, found.new, found.old) == (status, new, old)


def test_what_is_not_there() -> None:
    assert compare.finding(TIME, None, {"ratio": 1.0}).status == "not run"
    missing = compare.finding(TIME, {"ratios": 1.0}, {"ratio": 1.0})
    assert missing.status == "missing"
    whole_only = dataclasses.replace(TIME, whole_only=True)
    assert compare.finding(whole_only, {"ratios": 1.0}, {"ratio": 1.0}).status == "not run"
    assert missing.line() == "missing  time (ratio is not in growth.json)"


@pytest.mark.parametrize(
    ("path", "result", "value"),
    [
        ("a/b", {"a": {"b": 2}}, 2.0),
        ("a/1/b", {"a": [{"b": 2}, {"b": 3}]}, 3.0),
        ("a/*/b", {"a": [{"b": 2}, {"b": 3}]}, 3.0),
        ("a/*", {"a": {"x": 2, "y": 3}}, 3.0),
        ("a/w=o/b", {"a": [{"w": "o", "b": 2}, {"w": "p", "b": 9}, {"w": "o", "b": 3}]}, 3.0),
        (
            "a/w=o&v=True/b",
            {
                "a": [
                    {"w": "o", "v": False, "b": 2},
                    {"w": "o", "v": True, "b": 3},
                    {"w": "o", "v": True, "b": 2},
                ]
            },
            3.0,
        ),
    ],
)
def test_a_path_leads_to_its_worst_number(path: str, result: Any, value: float) -> None:
    claim = dataclasses.replace(TIME, path=path)
    assert claim.value(result) == value
    if "*" in path or "=" in path:
        assert dataclasses.replace(claim, lower=False).value(result) == 2.0


@pytest.mark.parametrize(
    ("path", "result"),
    [("a/b", {"a": {}}), ("a", {"a": "text"}), ("a", {"a": True}), ("a/*", {"a": []}),
     ("a", {"a": float("nan")}),
     ("a/b", {"a": 1}), ("a/w=o", {"a": [{"w": "p"}]}), ("a/3", {"a": [1]}), ("a/b", {"a": [1]})],
)  # fmt: skip
def test_what_is_no_number_is_missing(path: str, result: Any) -> None:
    with pytest.raises(KeyError):
        dataclasses.replace(TIME, path=path).value(result)


def test_goals_are_met_at_their_value() -> None:
    assert TIME.met(1.0) and not TIME.met(1.001)
    assert SPEED.met(50) and not SPEED.met(49.9)
    assert dataclasses.replace(TIME, goal=None).met(9.0) is None


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(1.0, "x", "1x"), (1.0036, "x", "1.004x"), (81.57, "x", "81.6x"), (0.08, "%", "8 %"),
     (0.797, "x", "0.797x"), (120.0, "x", "120x")],
)  # fmt: skip
def test_figures_keep_what_matters(value: float, unit: str, shown: str) -> None:
    assert dataclasses.replace(TIME, unit=unit).shown(value) == shown


def test_every_claim_has_a_figure_in_the_committed_result() -> None:
    for claim in claims.CLAIMS:
        result = claims.read(RESULTS, claim.bench)
        if result is not None:
            assert claim.value(result) > 0, claim.what


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "lab/bench/compare.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_command_names_what_got_worse(tmp_path: Path) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    unchanged = run(str(tmp_path))
    assert unchanged.returncode == 0, unchanged.stdout + unchanged.stderr
    assert "worse" not in unchanged.stdout and "another machine" not in unchanged.stdout
    file = tmp_path / "grading.json"
    result = json.loads(file.read_text())
    committed = result["all"]["wall_speedup"]
    result["all"]["wall_speedup"] /= 2
    result["machine"]["cores"] = 64
    file.write_text(json.dumps(result))
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "got worse or missing: grading, 10,000 answers\n"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("worse")]
    assert line == (
        f"worse    grading, 10,000 answers {committed / 2:.3g}x, committed {committed:.3g}x "
        "(goal at least 1x: met)"
    )
    assert "grading.json: another machine: cores 64, committed 2" in done.stdout


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}: no result of lab/bench/claims.py there\n"


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "growth.json").write_text("{")
    done = run(str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "growth.json: not JSON" in done.stderr.splitlines()[-1]


def test_a_committed_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(str(RESULTS), "--committed", str(tmp_path / "none"))
    assert done.returncode == 2 and "none: no such folder" in done.stderr.splitlines()[-1]
