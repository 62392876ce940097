"""examples/notebooks/first_run.ipynb to its end: it trains, draws, and opens the report."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sg_rlhf.run_dir import jsonl_log
from tests.unit.docs.page import ROOT, clone


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
