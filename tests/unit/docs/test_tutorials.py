"""The tutorials and docs/gpu.md, all but the training (tests/integration has that)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.gpu.stages import STAGES
from tests.unit.docs.page import ROOT, TUTORIALS, blocks, follow, trainings

# -- docs/tutorials/1_first_run.md: its commands, and figures that are those of the other pages --


FIRST = TUTORIALS / "1_first_run.md"


@pytest.mark.full
def test_the_first_run(tmp_path: Path) -> None:
    done = follow(tmp_path, training=False, page=FIRST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# the command that trains it") == trainings(FIRST) == 4
    for run in ("kk_grpo_sg_tiny_cpu", "kk_lr1e-4", "kk_grpo"):
        assert re.search(rf"/runs/{run}\s", done.stdout)
    assert "lr: 0.0001" in done.stdout and "range: 1 to 1.2" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_the_figures_are_those_of_the_readme() -> None:
    block = re.compile(r"<!-- quick start: begin -->.*<!-- quick start: end -->", re.DOTALL)
    found, readme = (block.findall(page.read_text()) for page in (FIRST, ROOT / "README.md"))
    assert found == readme and len(found) == 1
    example = (ROOT / "examples" / "kk" / "README.md").read_text()
    for accuracy in re.findall(r"accuracy 0(\.\d+) \+- 0(\.\d+)", found[0]):
        assert " +- ".join(accuracy) in example


# -- docs/tutorials/2_first_weighting.md, all but the training (tests/integration has that) ------


SECOND = TUTORIALS / "2_first_weighting.md"


@pytest.mark.full
def test_the_first_weighting(tmp_path: Path) -> None:
    files, commands = blocks(SECOND)
    assert (
        set(files) == {"my_weighting.py", "my_weighting.yaml", "by_sign.py"} and len(commands) == 3
    )
    done = follow(tmp_path, training=False, page=SECOND)
    assert done.returncode == 0, done.stderr
    # Of the two weights commands: the range at s = 0.5, and the zones that the page speaks of.
    assert done.stdout.count("range: 0.75 to 1.25") == 2
    assert done.stdout.count("dead zone: a token with positive advantage") == 1
    assert done.stdout.count("range: 0.25 to 1\n") == 1
    assert (tmp_path / "my_weighting.png").stat().st_size > 1000
    # The dry run: this weighting, outside the clip, is what would train.
    assert "token weights: my_weighting:Middle, 0.75 to 1.25, outside the clip" in done.stdout
    assert not (tmp_path / "runs").exists()


# -- docs/tutorials/3_first_domain.md, all but the training (tests/integration has that) ---------


THIRD = TUTORIALS / "3_first_domain.md"


@pytest.mark.full
def test_the_first_domain(tmp_path: Path) -> None:
    files, _ = blocks(THIRD)
    assert set(files) == {
        "sums.jsonl", "mine.yaml", "my_reward.py", "chat.jsonl", "verl.jsonl", "my_agent.py",
        "my_sums.py",
    }  # fmt: skip
    done = follow(tmp_path, training=False, page=THIRD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# the command that trains it") == trainings(THIRD) == 6
    # Every file that the page names is there; nothing but the labels is worth a remark.
    assert "not on this machine" not in done.stdout
    remarks = [line for line in done.stdout.splitlines() if line.startswith("# remark: ")]
    said = "4 of 4 labels are numbers: the reward function gets them as text"
    assert len(remarks) == 3 and all(said in line for line in remarks)
    # The domain's own command and suite.
    assert "data/sums/train.jsonl  32 rows" in done.stdout
    results = json.loads((tmp_path / "out" / "sums" / "results.json").read_text())
    assert results["benchmarks"]["sums"]["scores"]["accuracy"]["n_questions"] == 100
    assert not (tmp_path / "runs").exists()


def test_the_reward_of_the_page_is_right(tmp_path: Path) -> None:
    files, _ = blocks(THIRD)
    names: dict[str, object] = {}
    exec(files["my_reward.py"], names)
    reward_func = names["reward_func"]
    assert callable(reward_func)
    for response, reward in ((" \\boxed{7}", 1.1), (" \\boxed{8}", 0.1), (" seven", 0.0)):
        found = reward_func(["p \\boxed{7}" + response], ["p \\boxed{7}"], ["7"])
        assert found["rewards"] == pytest.approx(reward)


# -- docs/gpu.md, as far as a machine without a GPU goes -----------------------------------------


GPU = ROOT / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = follow(tmp_path_factory.mktemp("clone"), training=False, page=GPU)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_of_plans_is_as_printed(printed: str) -> None:
    rows = re.findall(r"^\| \d x 80 GB \| .* \| ([\d.]+) GiB \| (\d+) s \|$", GPU.read_text(), re.M)
    assert len(rows) == 2
    for free, seconds in rows:
        assert f"{free} GiB of a GPU stay free" in printed
        assert f"time, an estimate: {seconds} s a rollout" in printed


def test_every_stage_is_skipped_and_named(printed: str) -> None:
    assert printed.count("skipped         no GPU") == len(STAGES)
    assert re.findall(r"^\| ([a-z]) \| ", GPU.read_text(), re.M) == [stage.key for stage in STAGES]


def test_the_dry_run_names_the_command(printed: str) -> None:
    assert "sg-rlhf train --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml" in printed
