"""What runs and groups are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.report.names import group_names, run_names

A, B, C, D = "s0-c30b4c32", "s1-e5fdf654", "s0-76f3c17d", "s1-185c396a"


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        # The runs' own names say it.
        ([["sg_s0", "sg_s1"], ["grpo"]], ["sg", "grpo"]),
        ([["kk/sg_seed1", "kk/sg_seed2"], ["old/grpo_seed1"]], ["sg", "grpo_seed1"]),
        # A study: the folder of the variant, of the regime where there are several.
        ([[f"base/grpo/{A}", f"base/grpo/{B}"], [f"base/sg/{C}", f"base/sg/{D}"]], ["grpo", "sg"]),
        ([[f"base/ar/{A}"], [f"base/random/{C}"]], ["ar", "random"]),
        (
            [[f"base/grpo/{A}", f"base/grpo/{B}"], [f"base/sg/{C}"], [f"high_lr/sg/{D}"]],
            ["base/grpo", "base/sg", "high_lr/sg"],
        ),
        ([[f"base/grpo/{A}"], [f"high_lr/grpo/{C}"]], ["base/grpo", "high_lr/grpo"]),
        # Seeds of one configuration in two folders: what they share.
        ([[f"base/grpo/{A}", f"again/grpo/{B}"], [f"base/sg/{C}"]], ["grpo", "base/sg"]),
        ([["a/run"], ["b/run"]], ["a", "b"]),
        ([[A], [f"lr/{C}"]], ["root", "lr"]),
        # One group has its folder's name.
        ([[f"base/grpo/{A}", f"base/grpo/{B}"]], ["grpo"]),
        ([["seed_0", "seed_1"]], ["root"]),
        # No folder tells them apart.
        ([["sg_s0", "sg_s1"], ["sg_s2", "sg_s3"], ["grpo"]], ["sg [1]", "sg [2]", "grpo"]),
        (
            [[f"grpo/{A}"], [f"grpo/{C}"], [f"sg/{B}", f"sg/{D}"]],
            ["grpo [1]", "grpo [2]", "sg"],
        ),
    ],
)
def test_groups_have_the_names_that_tell_them_apart(
    groups: list[list[str]], names: list[str]
) -> None:
    root = Path("/somewhere/root")
    assert group_names([[root / path for path in paths] for paths in groups]) == names


def test_runs_have_the_folders_that_tell_them_apart() -> None:
    root = Path("/somewhere/root")
    paths = [root / "a" / "run", root / "b" / "run", root / "b" / "sg", root / "b" / A]
    assert run_names(paths) == ["a/run", "b/run", "sg", f"b/{A}"]
    assert run_names([root / "run"]) == ["run"]
