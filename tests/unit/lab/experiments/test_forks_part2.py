"""The second part of the study of forks: its plan, its control, what is fixed."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.experiments.forks_part2 import analyse, dose_response, entropy_matched, gradients
from lab.experiments.forks_part2.zero_low import ZeroLow
from lab.study import decision
from lab.study.plan import Cell, load_study
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.data_io.dataset_writer import sha256_of

STUDY = load_study(gradients.HERE / "study.yaml")


def test_a_block_is_one_seed_and_corpus_with_every_arm() -> None:
    cells = [*STUDY.cells()]
    assert len(cells) == 90
    for block in (cells[i : i + 5] for i in range(0, 90, 5)):
        assert len({(cell.regime, cell.seed) for cell in block}) == 1
        assert {cell.variant for cell in block} == STUDY.file.variants.keys()
    for corpus in "rd":
        seeds = {cell.seed for cell in cells if cell.regime[0] == corpus}
        assert seeds == {0, 1, 2, 9, 10, 11, 18, 19, 20}


def test_the_plan_is_the_fixed_one() -> None:
    decision.check(STUDY)
    rule = decision.decision_of(STUDY)
    assert rule.arms == {"grpo", "sg_inside", "mask_only", "zero_low"}
    assert sorted(itertools.chain(*rule.groups.values())) == sorted(STUDY.file.regimes)


def test_the_control_removes_the_tokens_whose_weight_is_below_the_upper_one() -> None:
    p = torch.linspace(0, 1, 2001, dtype=torch.float64)
    published = make_weighting("grpo_sg").curve(p)
    assert torch.equal(ZeroLow().curve(p) == 0, published < 1.4)
    assert make_weighting("lab.experiments.forks_part2.zero_low:ZeroLow") == ZeroLow()


def test_the_start_models_are_the_measured_ones() -> None:
    gates = json.loads((gradients.HERE / "gates.json").read_text())
    assert gates["failed"] == []
    for name, figures in gates["starts"].items():
        weights = gradients.HERE / "starts" / name / "model.safetensors"
        assert sha256_of(weights) == figures["sha256"]
    for file in (gradients.OUT, dose_response.OUT):
        for name, found in json.loads(file.read_text()).items():
            assert found["sha256"] == gates["starts"][name]["sha256"]


def made_up_runs(cells: list[Cell]) -> dict[str, Any]:
    rng = random.Random(1)
    found = {}
    for cell in cells:
        level = 0.5 - 0.1 * (cell.variant == "sg_inside") - 0.3 * (cell.variant == "zero_low")
        curve = [{"rollout": r, "held_out": level + rng.gauss(0, 0.01)} for r in (10, 20, 30, 40)]
        figures = {"entropy_after": 0.2, "grad_norm_peak": 2.0, "grad_norm_mean": 1.0}
        found[cell.name] = {
            "curves": {"accuracy": curve, "reward": [0.5] * 40, "good_words": [0.5] * 40},
            "figures": {key: value + 0.01 * rng.random() for key, value in figures.items()},
            "commit": "abc",
        }
    return found


def test_the_tables_and_the_picture_of_complete_blocks(tmp_path: Path) -> None:
    cells = [*STUDY.cells()]
    runs = made_up_runs(cells[:40])
    lines = decision.report(STUDY, runs)
    assert "40 runs are missing: no verdict yet" in "\n".join(lines)
    table = analyse.secondary(STUDY, runs)
    assert sum("| sg_inside | grpo | 4 |" in line for line in table) == 2 * len(analyse.SECONDARY)
    analyse.draw(STUDY, runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


# -- The dose-response curve and the entropy-matched control -------------------------------------


@pytest.mark.parametrize("ratio", dose_response.RATIOS)
def test_the_stretched_weight_goes_from_1_to_the_ratio(ratio: float) -> None:
    cfg = make_weighting("grpo_sg", dose_response.stretched(ratio))
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    expected = 1 + (ratio - 1) * (2 * torch.sigmoid(9 * p) - 1)
    assert torch.allclose(cfg.curve(p), expected, rtol=0, atol=1e-12)
    dose = make_weighting("grpo_sg", {"lower": 0.5, "upper": 1.5})
    if ratio == 3:
        assert torch.allclose(cfg.curve(p), 2 * dose.curve(p), rtol=0, atol=1e-12)


def test_the_bound_is_reached_by_two_orthogonal_gradients() -> None:
    # Kantorovich: the worst split gives the squared norms the shares r / (1 + r), 1 / (1 + r).
    for ratio in (1.4, 3.0, 5.0):
        share = torch.linspace(0, 1, 100_001, dtype=torch.float64)
        mean, square = 1 + (ratio - 1) * share, 1 + (ratio**2 - 1) * share
        assert float((mean / square.sqrt()).min()) == pytest.approx(
            dose_response.least_cosine(ratio), abs=1e-9
        )


def test_the_bonus_gives_the_arms_rate_of_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    grpo, entropy, arm = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    target = entropy_matched.rate(arm, entropy)
    bonus = entropy_matched.matching_bonus(grpo, entropy, target)
    assert entropy_matched.rate(grpo - bonus * entropy, entropy) == pytest.approx(target, abs=1e-9)
    own = entropy_matched.rate(grpo, entropy)
    assert entropy_matched.matching_bonus(grpo, entropy, own) == pytest.approx(0, abs=1e-9)
    # A bonus raises the entropy.
    assert entropy_matched.rate(grpo - 0.1 * entropy, entropy) > own
