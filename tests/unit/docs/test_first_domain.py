"""docs/tutorials/3_first_domain.md, all but the training (tests/integration has that)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.docs.page import TUTORIALS, blocks, follow, trainings

PAGE = TUTORIALS / "3_first_domain.md"


def test_every_step_but_the_training(tmp_path: Path) -> None:
    files, _ = blocks(PAGE)
    assert set(files) == {
        "sums.jsonl", "mine.yaml", "my_reward.py", "chat.jsonl", "verl.jsonl", "my_agent.py",
        "my_sums.py",
    }  # fmt: skip
    done = follow(tmp_path, training=False, page=PAGE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# the command that trains it") == trainings(PAGE) == 6
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
    files, _ = blocks(PAGE)
    names: dict[str, object] = {}
    exec(files["my_reward.py"], names)
    reward_func = names["reward_func"]
    assert callable(reward_func)
    for response, reward in ((" \\boxed{7}", 1.1), (" \\boxed{8}", 0.1), (" seven", 0.0)):
        found = reward_func(["p \\boxed{7}" + response], ["p \\boxed{7}"], ["7"])
        assert found["rewards"] == pytest.approx(reward)
