"""docs/tutorials/1_first_run.md: its commands, and figures that are those of the other pages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.docs.page import ROOT, TUTORIALS, follow, trainings

PAGE = TUTORIALS / "1_first_run.md"


def test_every_step_but_the_training(tmp_path: Path) -> None:
    done = follow(tmp_path, training=False, page=PAGE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# the command that trains it") == trainings(PAGE) == 4
    for run in ("kk_grpo_sg_tiny_cpu", "kk_lr1e-4", "kk_grpo"):
        assert re.search(rf"/runs/{run}\s", done.stdout)
    assert "lr: 0.0001" in done.stdout and "range: 1 to 1.2" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_the_figures_are_those_of_the_readme() -> None:
    block = re.compile(r"<!-- quick start: begin -->.*<!-- quick start: end -->", re.DOTALL)
    found, readme = (block.findall(page.read_text()) for page in (PAGE, ROOT / "README.md"))
    assert found == readme and len(found) == 1
    example = (ROOT / "examples" / "kk" / "README.md").read_text()
    for accuracy in re.findall(r"accuracy 0(\.\d+) \+- 0(\.\d+)", found[0]):
        assert " +- ".join(accuracy) in example
