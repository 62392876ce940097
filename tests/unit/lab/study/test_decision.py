"""Verdicts of preregistered studies: outcomes, gates, missing runs, changed files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.study import command, decision, runner
from lab.study.plan import Study, load_study
from sg_rlhf.config import ConfigError

ROOT = Path(__file__).parents[4]
ARMS = ["grpo", "sg", "control", "secondary"]
MEANINGS = {key: f"it is {key}" for key in ("better", "equivalent", "worse", "ambiguous")}
RULE: dict[str, Any] = {
    "end_point": {"rollouts": [10, 20]},
    "margin": 0.02,
    "groups": {"all": ["a", "b", "c"]},
    "contrasts": [{"treated": "sg", "baseline": "grpo", **MEANINGS}],
    "control": ["control", "grpo"],
    "files": ["plan.md"],
}


def study(folder: Path, **changes: Any) -> Study:
    grpo = str(ROOT / "configs/algorithms/grpo.yaml")
    (folder / "plan.md").write_text("nine seeds")
    path = folder / "study.yaml"
    content = {
        "about": "a rule",
        "base": str(ROOT / "configs/kk/grpo_tiny_cpu.yaml"),
        "baseline": "grpo",
        "seeds": [0, 1, 2],
        "regimes": {name: {"set": {"actor.adam.lr": 0.1}} for name in "abc"},
        "variants": {arm: {"recipe": grpo} for arm in ARMS},
        "plan": [{"regimes": [*"abc"], "variants": ARMS}],
        "decision": {**RULE, **changes},
    }
    path.write_text(yaml.safe_dump(content))
    return load_study(path)


def runs(found: Study, effect: float, sd: float = 0.004, control: float = 0.2) -> dict[str, Any]:
    rng = random.Random(3)
    made = {}
    for cell in found.cells():
        level = 0.6 + rng.gauss(0, sd) + effect * (cell.variant == "sg")
        level += control * (cell.variant == "control")
        curve = [{"rollout": r, "held_out": level + r / 100 - 0.15} for r in (10, 20)]
        # Neither a later rollout nor another set is part of the end point.
        curve.append({"rollout": 30, "held_out": 9.0})
        made[cell.name] = {"curves": {"accuracy": curve}, "commit": "abc"}
    return made


@pytest.mark.parametrize(
    ("effect", "sd", "control", "expected"),
    [
        (0.1, 0.004, 0.2, "better"),
        (-0.1, 0.004, 0.2, "worse"),
        (0.0, 0.004, -0.2, "equivalent"),
        (0.0, 0.004, 0.0, "ambiguous"),  # the control has no effect
        (0.0, 0.1, 0.9, "ambiguous"),  # the interval is wide
        (0.01, 0.004, 0.2, "equivalent"),  # significant, and inside the margin
        (0.01, 0.004, 0.0, "better"),
    ],
)
def test_the_first_outcome_that_applies(
    tmp_path: Path, effect: float, sd: float, control: float, expected: str
) -> None:
    found = study(tmp_path)
    decision.fix(found)
    lines = decision.report(found, runs(found, effect, sd, control))
    assert lines[-1] == f"- all: sg minus grpo: **{expected}**. it is {expected}"
    (row,) = [line for line in lines if line.startswith("| all: sg minus grpo | 9 |")]
    assert row.endswith(f"| {expected} |")
    assert any(line.startswith("| all: control minus grpo (control) | 9 |") for line in lines)
    assert "Commits of the runs: abc." in lines


def test_a_missing_run_of_a_compared_arm_leaves_no_outcome(tmp_path: Path) -> None:
    found = study(tmp_path)
    decision.fix(found)
    made = runs(found, 0.1)
    del made["a/secondary/s0"]
    assert "**better**" in decision.report(found, made)[-1]
    del made["b/sg/s1"]
    lines = decision.report(found, made)
    assert "1 runs are missing: no verdict yet" in lines
    assert not any("better" in line for line in lines)
    assert any(line.startswith("| all: sg minus grpo | 8 | +0.1") for line in lines)
    assert decision.report(found, {})[0] == "27 runs are missing: no verdict yet"


def test_holm_counts_the_contrasts_of_all_groups(tmp_path: Path) -> None:
    groups = {name: [name] for name in "abc"}
    found = study(tmp_path, groups=groups)
    decision.fix(found)
    made = runs(found, 0.02, sd=0.006, control=0.0)
    rows = [line.split(" | ") for line in decision.report(found, made) if "sg minus grpo |" in line]
    p = [float(row[5]) for row in rows]
    least = min(range(3), key=p.__getitem__)
    assert float(rows[least][6]) == pytest.approx(min(1.0, 3 * p[least]), rel=0.01)


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        ({"file": "g.json", "at": "failed", "equals": []}, None),
        ({"file": "g.json", "at": "failed", "equals": ["r0"]}, "g.json: failed is []"),
        ({"file": "g.json", "at": "r0.cosine", "most": 0.97}, None),
        ({"file": "g.json", "at": "r0.cosine", "most": 0.5}, "g.json: r0.cosine is 0.9"),
        ({"file": "g.json", "at": "r0.cosine", "least": 0.95}, "g.json: r0.cosine is 0.9"),
        ({"file": "g.json", "at": "r1.cosine", "most": 1.0}, "g.json: r1.cosine: not there"),
        ({"file": "h.json", "at": "r1", "most": 1.0}, "h.json: r1: not there"),
    ],
)
def test_a_failed_gate_leaves_no_outcome(
    tmp_path: Path, gate: dict[str, Any], line: str | None
) -> None:
    (tmp_path / "g.json").write_text(json.dumps({"failed": [], "r0": {"cosine": 0.9}}))
    found = study(tmp_path, gates=[gate])
    decision.fix(found)
    lines = decision.report(found, runs(found, 0.1))
    assert ("**better**" in lines[-1]) is (line is None)
    assert line is None or lines[0] == line


@pytest.mark.parametrize("name", ["study.yaml", "plan.md"])
def test_a_changed_file_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = study(tmp_path)
    arguments = ["--study", str(found.path), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    assert command.main([*arguments, "--verdict"]) == 2
    assert "decision.sha256: not there; write it with --fix" in capsys.readouterr().err
    assert command.main([*arguments, "--fix"]) == 0
    assert command.main([*arguments, "--verdict"]) == 0
    assert "27 runs are missing" in capsys.readouterr().out
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    assert command.main([*arguments, "--verdict"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / name}: changed since" in error and error.count("\n") == 1


def test_the_analysis_is_fixed_as_well(tmp_path: Path) -> None:
    listed = decision.fix(study(tmp_path)).read_text()
    assert "lab/study/decision.py" in listed and "lab/study/paired.py" in listed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": {"all": ["z"]}}, "decision: regime 'z'"),
        ({"control": ["z", "grpo"]}, "decision: variant 'z'"),
        ({"margin": 0}, "decision.margin=0: expected greater than 0"),
        ({"margins": 1}, "unknown key 'decision.margins'; did you mean margin?"),
    ],
)
def test_a_wrong_rule_gets_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        study(tmp_path, **changes)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LAB", tmp_path / "lab")
    (tmp_path / "lab").mkdir()
    assert runner.commit() is None
    monkeypatch.undo()
    found = runner.commit()
    assert found is None or len(found.removesuffix("+")) == 40
