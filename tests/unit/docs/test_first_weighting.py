"""docs/tutorials/2_first_weighting.md, all but the training (tests/integration has that)."""

from __future__ import annotations

from pathlib import Path

from tests.unit.docs.page import TUTORIALS, blocks, follow

PAGE = TUTORIALS / "2_first_weighting.md"


def test_every_step_but_the_training(tmp_path: Path) -> None:
    files, commands = blocks(PAGE)
    assert (
        set(files) == {"my_weighting.py", "my_weighting.yaml", "by_sign.py"} and len(commands) == 3
    )
    done = follow(tmp_path, training=False, page=PAGE)
    assert done.returncode == 0, done.stderr
    # Of the two weights commands: the range at s = 0.5, and the zones that the page speaks of.
    assert done.stdout.count("range: 0.75 to 1.25") == 2
    assert done.stdout.count("dead zone: a token with positive advantage") == 1
    assert done.stdout.count("range: 0.25 to 1\n") == 1
    assert (tmp_path / "my_weighting.png").stat().st_size > 1000
    # The dry run: this weighting, outside the clip, is what would train.
    assert "token weights: my_weighting:Middle, 0.75 to 1.25, outside the clip" in done.stdout
    assert not (tmp_path / "runs").exists()
