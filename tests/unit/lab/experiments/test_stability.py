"""The study of stability: what counts as a collapse, its test, the tables of part of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.experiments.stability import analyse
from lab.study import decision
from lab.study.plan import load_study

STUDY = load_study(analyse.HERE / "study.yaml")


def run(*held_out: float, reward: list[float] | None = None) -> dict[str, Any]:
    """A run with these accuracies after 0, 10 and 20 rollouts."""
    curve = [
        {"rollout": rollout, "held_out": value}
        for rollout, value in zip((0, 10, 20), held_out, strict=True)
    ]
    figures = {"entropy_after": 0.2, "grad_norm_mean": 0.3, "grad_norm_max": 1.0}
    return {
        "curves": {"accuracy": curve, "reward": reward or [0.5] * 20},
        "figures": figures,
        "commit": "abc",
    }


def test_a_run_that_ends_below_its_start_has_collapsed() -> None:
    assert analyse.collapsed(run(0.36, 0.5, 0.35))
    assert not analyse.collapsed(run(0.36, 0.1, 0.36))


def test_the_largest_fall_is_from_an_earlier_mean_of_five() -> None:
    assert analyse.largest_fall(run(0, 0, 0, reward=[0.1] * 5 + [0.6] * 5 + [0.2] * 5)) == (
        pytest.approx(0.4)
    )
    assert analyse.largest_fall(run(0, 0, 0, reward=[0.1 * i for i in range(9)])) == 0


def test_mcnemars_test_is_a_coin_for_each_pair_that_differs() -> None:
    assert analyse.mcnemar(0, 0) == 1
    assert analyse.mcnemar(7, 0) == analyse.mcnemar(0, 7) == pytest.approx(2 / 2**7)
    assert analyse.mcnemar(3, 3) == 1


def test_the_tables_and_the_picture_of_the_runs_that_are_there(tmp_path: Path) -> None:
    cells = [*STUDY.cells()][:30]
    runs = {
        cell.name: run(
            0.36, 0.4, (0.3 if cell.variant == "grpo" and cell.seed else 0.5) + 0.001 * (i * i % 7)
        )
        for i, cell in enumerate(cells)
    }
    assert "33 runs are missing: no verdict yet" in "\n".join(decision.report(STUDY, runs))
    assert analyse.collapses(STUDY, runs)[-1] == "| all | 13 | 10 | 0 | 10 | 0 | 0.00195 |"
    table = analyse.secondary(STUDY, runs)
    assert sum("largest gradient norm | 5 x" in line for line in table) == 1
    analyse.draw(STUDY, runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
