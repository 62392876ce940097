"""docs/my_data.md, followed up to the training itself (tests/integration has that)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.page import ROOT, blocks, follow

PAGE = ROOT / "docs" / "my_data.md"


def test_every_step_but_the_training(tmp_path: Path) -> None:
    files, commands = blocks(PAGE)
    assert set(files) == {
        "sums.jsonl", "mine.yaml", "my_reward.py", "chat.jsonl", "verl.jsonl", "my_agent.py",
    }  # fmt: skip
    done = follow(tmp_path, training=False, page=PAGE)
    assert done.returncode == 0, done.stderr
    count = "".join(commands).count("python -m sg_rlhf.train ")
    assert count == done.stdout.count("# the command that trains it") == 5
    # Every file that the page names is there; nothing but the labels is worth a remark.
    assert "not on this machine" not in done.stdout
    remarks = [line for line in done.stdout.splitlines() if line.startswith("# remark: ")]
    said = "4 of 4 labels are numbers: the reward function gets them as text"
    assert len(remarks) == 3 and all(said in line for line in remarks)
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
