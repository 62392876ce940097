"""The page as text: complete, self-contained, inert, and drawn from whatever a run has."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from sg_rlhf.report import page
from sg_rlhf.run_dir import jsonl_log
from tests.unit.report.synthetic import write_hostile_samples, write_run


def build(*run_dirs: Path) -> str:
    return page.build(*page.read_runs(list(run_dirs)))


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_every_figure_is_there_for_a_whole_run(tmp_path: Path) -> None:
    text = build(write_run(tmp_path / "run", sets=True))
    for entry in page.catalogue.FIGURES:
        assert f'<figure id="figure-{entry.key}"' in text, entry.key
    assert "Accuracy of each set" in text and "held_out: 3 people" in text
    assert "every token trained on" in text
    assert "L2 norm before clipping (1 spike)" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_without_scripts_the_page_has_its_numbers(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=3)
    rewards = [row["rollout/reward_mean"] for row in jsonl_log.read(run_dir / jsonl_log.METRICS)]
    text = build(run_dir)
    assert "The figures need JavaScript." in text
    numbers = (rewards[0], rewards[-1], min(rewards), max(rewards))
    row = "".join(f"<td>{value:.4g}</td>" for value in numbers)
    assert f'<th scope="row">run</th>{row}' in text


def test_the_plotting_library_is_the_published_one() -> None:
    """As its README says; the page has its licence, as MIT asks of every copy."""
    folder = Path(page.__file__).parent / "uplot"
    readme = (folder / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert f"| {name} | {digest} |" in readme


def test_a_long_comparison_stays_below_one_megabyte(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"s{n}", seed=n, rollouts=400, tokens=200) for n in range(4)]
    text = build(*runs)
    assert len(text.encode()) < 1_000_000
    assert "(<code>--samples N</code> for more)" in text


def test_the_page_names_nothing_outside_itself(tmp_path: Path) -> None:
    text = build(write_run(tmp_path / "run"))
    assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", text)
    assert "Permission is hereby granted" in text  # uPlot's licence
    assert "default-src 'none'" in text and "unsafe-eval" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy and "script-src 'sha256-" in policy[1]
    assert policy[1].count("unsafe-inline") == 1  # styles: of bars and legends


def test_hostile_content_stays_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "<b>run$x_{</b>" / "<img src=x onerror=alert(1)>$y^{$")
    write_hostile_samples(run_dir)
    text = build(run_dir)
    text.encode("utf-8")
    assert "<img" not in text and "<b>" not in text
    assert text.count("<script") == 2 and text.count("</script") == 2
    assert "<!--" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u2029\u202e]", text)
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|>49<", text)
    pieces = data_of(text)["pieces"]
    assert isinstance(pieces, list) and "⟨U+D800⟩" in pieces
    assert "</script><script>window.__pwned=1</script>" in pieces


@pytest.mark.parametrize(
    "absent", [jsonl_log.OPTIMIZER_STEPS, jsonl_log.SAMPLES, jsonl_log.EVALUATIONS]
)
def test_a_missing_file_is_a_sentence(tmp_path: Path, absent: str) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / absent).unlink()
    sentences = {
        jsonl_log.OPTIMIZER_STEPS: "optimizer_steps.jsonl has no gradient norm.",
        jsonl_log.SAMPLES: "No token occurs 10 times in samples.jsonl.",
        jsonl_log.EVALUATIONS: "No evaluation names its sets or data sources.",
    }
    text = build(run_dir)
    assert sentences[absent] in text
    assert "<h3>Not drawn</h3>" in text
    assert ("The runs kept no samples" in text) is (absent == jsonl_log.SAMPLES)


def test_held_out_accuracy_is_beside_the_name_of_the_run(tmp_path: Path) -> None:
    text = build(write_run(tmp_path / "run"))
    heads = re.findall(r'<th scope="col">([^<]+)</th>', text)
    assert heads[:3] == ["run", "held-out accuracy", "seed"]
    row = re.search(r'<th scope="row">.*?</th>\s*<td>(.*?)</td>\s*<td>(.*?)</td>', text, re.S)
    assert row and "→" in row[1] and row[2] == "0"


def test_metrics_of_one_rollout_are_enough(tmp_path: Path) -> None:
    jsonl_log.append(tmp_path / jsonl_log.METRICS, [{"global_step": 1}])
    text = build(tmp_path)
    assert "There is no config.yaml" in text and "No rollout has a mean reward." in text


def test_numbers_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    jsonl_log.append(
        run_dir / jsonl_log.OPTIMIZER_STEPS,
        [{"global_step": 13, "optimizer_step": 25, "actor_grad_norm": float("nan")}],
    )
    jsonl_log.append(
        run_dir / jsonl_log.METRICS, [{"global_step": 13, "rollout/reward_mean": None}]
    )
    assert "13" in build(run_dir)


def test_several_runs_say_what_differs_and_what_the_band_is(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"sg_s{seed}", seed=seed) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "grpo", recipe="grpo_tiny_cpu.yaml"))
    text = build(*runs)
    assert "lowest to\n    the highest seed" in text
    assert "<code>algo.kl.estimator</code>" in text and "sg (2 seeds)" in text
    assert "<code>train.seed</code>" not in text
