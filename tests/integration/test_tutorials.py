"""Tutorials and the notebook to their end."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sg_rlhf.run_dir import jsonl_log
from tests.unit.docs.page import ROOT, TUTORIALS, clone, follow

# -- docs/tutorials/2_first_weighting.md to its end: a weighting from outside the package trains --


@pytest.mark.full
def test_the_first_weighting_trains(tmp_path: Path) -> None:
    done = follow(tmp_path, training=True, page=TUTORIALS / "2_first_weighting.md")
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/first/optimizer_steps.jsonl").read_text().splitlines()
    means = [json.loads(row)["sg/weight_mean"] for row in rows]
    # Two rollouts of two steps. Most tokens have p near 1, where w is 0.75.
    assert len(means) == 4 and all(0.75 < mean < 1.0 for mean in means)


# -- docs/tutorials/3_first_domain.md to its end: a user's rows, reward, agent and domain train --


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_first_domain_trains(tmp_path: Path) -> None:
    done = follow(tmp_path, training=True, page=TUTORIALS / "3_first_domain.md")
    assert done.returncode == 0, done.stderr
    (own,) = jsonl_log.read(tmp_path / "runs/mine" / jsonl_log.METRICS)
    assert own["has_box"] > 0 and 0 <= own["rollout/reward_mean"] <= 1.1
    (agent,) = jsonl_log.read(tmp_path / "runs/agent" / jsonl_log.METRICS)
    assert 1 <= agent["attempts"] <= 2
    assert agent["rollout/reward_mean"] == pytest.approx(agent["rollout/accuracy"])
    domain = jsonl_log.read(tmp_path / "runs/sums" / jsonl_log.METRICS)
    assert len(domain) == 2 and all(row["format_ok"] > 0 for row in domain)
    results = json.loads((tmp_path / "out/sums/results.json").read_text())
    assert results["benchmarks"]["sums"]["scores"]["accuracy"]["n_questions"] == 100


# -- examples/notebooks/first_run.ipynb to its end: it trains, draws, and opens the report -------


@pytest.mark.full
def test_the_notebook_trains_and_opens_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone(tmp_path)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > "{opened}"\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / "first_run.ipynb", as_version=4)
    (settings,) = (cell for cell in notebook.cells if cell.source.startswith("recipe = "))
    # A reader's change of the settings: two rollout steps.
    for given, smaller in (("puzzles = 160", "puzzles = 16"), ("held_out = 100", "held_out = 10")):
        assert given in settings.source
        settings.source = settings.source.replace(given, smaller)

    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()

    run = tmp_path / "runs" / "notebook"
    assert [row["global_step"] for row in jsonl_log.read(run / jsonl_log.METRICS)] == [1, 2]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    for shown in ("rollout 2 of 2", "rollout step 1, reward", "rollout step 2, reward"):
        assert shown in printed
    assert opened.read_text().strip() == (run / "report.html").as_uri()
