"""lab.loop trains as the pipeline does: the same gradient; and a study runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab import loop
from lab.study.results import read_record
from tests.integration.conftest import ROOT, run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_its_gradient_is_the_pipelines(tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("loop_beside_pipeline.py", 1, str(out))
    found = torch.load(out, weights_only=True)
    assert len(found) == 6
    for name, ways in found.items():
        (gradient, row), (of_loop, of_loops) = ways["pipeline"], ways["loop"]
        assert (of_loop - gradient).norm() < 1e-5 * gradient.norm(), name
        same = ("policy_loss", "kl", "entropy_loss", "sg/weight_mean", "sg/zeroed_pos")
        names = {key: key for key in (*same, "actor_grad_norm")} | {
            "sg/clip_ratio": "ppo_clip_ratio"
        }
        for key, of_pipeline in names.items():
            assert of_loops[key] == pytest.approx(row[of_pipeline], rel=1e-3, abs=1e-6), (name, key)


STUDY = """
about: two rollouts
trainer: lab.loop
base: {configs}/math/grpo_tiny_cpu.yaml
baseline: grpo
seeds: [1]
domain: math
data: {{sums: --source arithmetic --generate count=8 test_count=4 seed=0}}
set:
  data.prompt_dataset: "{{data}}/sums/train.jsonl"
  eval.dataset: null
  sg.eval_sets: [{{name: held_out, dataset: "{{data}}/sums/test.jsonl", temperature: 1.0}}]
  rollout.batch_size: 4
  train.batch_size: 16
metrics: [correct]
regimes: {{one: {{}}}}
variants:
  grpo: {{}}
  grpo_sg: {{recipe: {configs}/algorithms/grpo_sg.yaml}}
plan: [{{regimes: [one], variants: [grpo, grpo_sg]}}]
"""


@pytest.mark.full
def test_a_study_trains_with_it(tmp_path: Path) -> None:
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(STUDY.format(configs=ROOT / "configs"))
    folders = ["--out", str(out), "--runs", str(tmp_path / "runs")]
    subprocess.run(
        [sys.executable, "-m", "lab.study", "--study", str(file), "--jobs", "2", *folders],
        cwd=ROOT, check=True, timeout=1800,
    )  # fmt: skip
    grpo, weighted = read_record(out).values()
    for run in (grpo, weighted):
        assert (run["figures"]["rollouts"], run["figures"]["optimizer_steps"]) == (2, 4)
        assert [row["rollout"] for row in run["curves"]["accuracy"]] == [0, 2]
        assert len(run["curves"]["correct"]) == 2 and all(run["curves"]["grad_norm"])
    # One start and one seed: the same responses until the first update.
    assert grpo["curves"]["reward"][0] == weighted["curves"]["reward"][0]
    assert grpo["figures"]["weight_mean"] == 1.0 < weighted["figures"]["weight_mean"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.max_epochs=2", "lab.loop: train.max_epochs=2: lab.loop does not follow it, expec"),
        ("algo.dynamic_filtering_enable=true", "lab.loop: algo.dynamic_filtering_enable=True: "),
        ("sg.correction=tis", "lab.loop: "),
        ("train.batch_size=12", "lab.loop: train.batch_size: expected a multiple of rollout.n_sa"),
        ("sg.eval_sets=[]", "lab.loop: sg.eval_sets: not set"),
    ],
)
def test_what_it_does_not_follow_is_refused(
    override: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "configs" / "math" / "grpo_tiny_cpu.yaml")
    sets = ["eval.dataset=null", "sg.eval_sets=[{name: a, dataset: a.jsonl, temperature: 1}]"]
    run_dir = ["--run-dir", str(tmp_path / "run")]
    assert loop.main(["--config", recipe, *run_dir, *sets, override]) == 2
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
